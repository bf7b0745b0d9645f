# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.transform``: base classes of transforms. Transforms of images are torchvision's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rankwise.compat.megengine.alias import refusing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PseudoTransform", "Transform"]


class Transform(ABC):
    """Transforms the samples of a batch, one after another, by the subclass's :meth:`apply`."""

    def apply_batch(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Return the samples of a batch, transformed."""
        return tuple(self.apply(one) for one in inputs)

    @abstractmethod
    def apply(self, input: Any) -> Any:  # noqa: A002 - as MegEngine has it; a sample
        """Return one sample, transformed."""

    def __repr__(self) -> str:
        return type(self).__name__


class PseudoTransform(Transform):
    """Does not change samples; the default of ``DataLoader(transform=)``."""

    def apply(self, input: Any) -> Any:  # noqa: A002 - as MegEngine has it; a sample
        """Return the sample."""
        return input


IMAGE_TRANSFORMS = "torchvision.transforms.v2, in the apply() of a subclass of megengine.data.transform.Transform"
__getattr__ = refusing("megengine.data.transform", __all__, IMAGE_TRANSFORMS)
