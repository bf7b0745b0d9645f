# SPDX-License-Identifier: Apache-2.0
"""Arguments of a subclass of Tensor that holds facts beside the values, as MONAI's MetaTensor.

Ranks compute with plain tensors; an output gets its type and facts as the subclass gives them to those of any function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.overrides import handle_torch_function

if TYPE_CHECKING:
    from collections.abc import Sequence


def is_of_subclass(leaf: object) -> TypeGuard[torch.Tensor]:
    """Tell whether a value is a tensor of a subclass that holds values of its own."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) in {torch.Tensor, torch.nn.Parameter}:
        return False
    return next(kind for kind in type(leaf).__mro__ if "__torch_dispatch__" in vars(kind)) is torch.Tensor


def plain(leaf: Any) -> Any:
    """Return a value, as a plain tensor of the same memory where it is one of a subclass."""
    return leaf.as_subclass(torch.Tensor) if is_of_subclass(leaf) else leaf


def as_output(output: Any, given: Sequence[Any]) -> Any:
    """Return an output as a function returns it whose arguments are ``given``."""
    dressed = [one for one in given if is_of_subclass(one)]
    if not dressed or not isinstance(output, torch.Tensor):
        return output
    return handle_torch_function(_first, dressed, output, *dressed)


def is_alike(output: Any, other: Any) -> bool:
    """Tell whether two outputs are of one type, and hold equal facts."""
    if not isinstance(output, torch.Tensor) or type(output) is torch.Tensor is type(other):
        return True
    return type(output) is type(other) and repr(vars(output)) == repr(vars(other))


def _first(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return output
