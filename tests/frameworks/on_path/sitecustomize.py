# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision's Python code be imported beside a torch without CUDA.

The wheels of torchvision on PyPI are built for CUDA. Beside a torch for CPUs their compiled operators do not load, and
``import torchvision`` fails where it looks two of them up. No script here calls such an operator: timm and others
import torchvision for its transforms. Python imports this file when it starts, from a folder on PYTHONPATH.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

LOOKED_UP = ("nms", "qnms")


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing: declares the operators when torchvision is about to be imported, so that no other Python waits."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                for name in LOOKED_UP:
                    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    torch.library.define(f"torchvision::{name}", schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
