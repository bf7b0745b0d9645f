# SPDX-License-Identifier: Apache-2.0
"""The inside of DTensors. Imports torch's DTensor, which takes long, only if there is one."""

from __future__ import annotations

import math
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.tensor import DTensor, Placement


READING = "_local_scalar_dense.default"
"""The operation of ``item()``, ``float()`` and ``bool()``."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor that may be split over ranks, as tensor_parallel splits it."""
    # Checking for the class would mean importing it, and to_local() is differentiable.
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


def placed_like(template: Any, part: torch.Tensor, *, requires_grad: bool = False) -> DTensor:
    """Return a DTensor of the shape and placements of ``template``, a DTensor, as torch itself rebuilds one.

    ``part`` is what this rank holds, on any device.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - there already, where a template is

    # Not from_local(), which moves the memory to the mesh's device.
    return DTensor(part, template._spec, requires_grad=requires_grad)  # noqa: SLF001


def placed_as_shaped(template: Any, part: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
    """Return a DTensor of a whole ``shape`` on the mesh of ``template``; replicated if that has another shape.

    ``part`` is what this rank holds, on any device.
    """
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - there already, where a template is
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415 - as above

    same = tuple(template.shape) == shape
    kept = template._spec  # noqa: SLF001 - where an order of the mesh dimensions is kept
    # Before torch 2.10 there is none.
    is_ordered = same and not getattr(kept, "use_strided_shard_as_shard_order", True)
    order: dict[str, Any] = {"shard_order": kept.shard_order} if is_ordered else {}
    row_major = tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
    spec = DTensorSpec(
        mesh=template.device_mesh,
        placements=tuple(template.placements if same else (Replicate(),) * len(template.placements)),
        tensor_meta=TensorMeta(torch.Size(shape), row_major, part.dtype),
        **order,
    )
    return DTensor(part, spec, requires_grad=False)


def replace_operations(replacements: Mapping[str, Callable[..., Any]]) -> Callable[[], None]:
    """Have functions compute what DTensors return for operations; return what undoes it.

    Args:
        replacements: by the name of an operation of aten, what is called with it and its arguments.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - there already, where a model is split

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001
    operations = {attrgetter(name)(torch.ops.aten): replace for name, replace in replacements.items()}
    handlers.update({one: partial(_call, replace) for one, replace in operations.items()})

    def undo() -> None:
        for one in operations:
            handlers.pop(one, None)

    return undo


def _call(replace: Callable[..., Any], operation: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return replace(operation, *args, **kwargs)


def check_data(check: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Have ``check`` called with a DTensor and what is assigned to its ``data``; return what undoes it."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - there already, where a model is split

    data: Any = torch.Tensor.data

    def assign(tensor: DTensor, value: object) -> None:
        check(tensor, value)
        data.__set__(tensor, value)

    DTensor.data = property(data.__get__, assign)  # pyright: ignore[reportAttributeAccessIssue, reportIncompatibleVariableOverride]
    return lambda: delattr(DTensor, "data") if "data" in vars(DTensor) else None


def shard_orders(tensor: Any) -> Iterator[tuple[int, list[int]]]:
    """Yield each dimension of a DTensor whose order is recorded, with the mesh dimensions that split it, in order."""
    for entry in getattr(tensor._spec, "shard_order", None) or ():  # noqa: SLF001
        yield entry.tensor_dim, list(entry.mesh_dims)


def split_factor(placement: Placement) -> int:
    """Return how many pieces there were before a placement split them: 1 except for strided ones."""
    return getattr(placement, "split_factor", 1)
