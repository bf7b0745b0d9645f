# SPDX-License-Identifier: Apache-2.0
"""What tensors are turned into while they travel: pairs of functions, there and back."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a compression has to offer; write your own class with these two functions."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what is to travel, and whatever :meth:`decompress` has to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ANN401 - whatever compress returned
        """Return what arrived as the kind of tensor that was given to :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ANN401, ARG004 - see Compressor
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16. Lossy: N ranks no longer compute what one computes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype; integers as they are."""
        return tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ANN401 - see Compressor
        """Return the tensor in the dtype it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressions there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
