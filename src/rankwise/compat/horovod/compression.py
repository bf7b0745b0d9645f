# SPDX-License-Identifier: Apache-2.0
"""Compression: pairs of functions that convert tensors before they are sent, and results back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Compressor:
    """Base class of compressions; write your own class with these two functions."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and whatever :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor as the kind of tensor that was given to :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors are sent unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004 - see Compressor
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors are sent as float16. Lossy: N ranks no longer compute what one computes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype; integers unchanged."""
        return tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the dtype it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The available compressions."""

    none = NoneCompressor
    fp16 = FP16Compressor


def compressed_all(
    tensors: Sequence[torch.Tensor], compression: type[Compressor]
) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Return the tensors to send, and what ``decompress`` needs for each."""
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)
    return compressed, contexts
