# SPDX-License-Identifier: Apache-2.0
"""Tensors as the bytes that are sent, saved and summed up: row-major, with conjugation and sign carried out."""

from __future__ import annotations

import torch


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor as they are sent: contiguous, without a graph; in the same memory if they are."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as [n] bytes in the same memory."""
    # One element counts as contiguous at any stride; torch's view does not think so.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to send from or to receive into."""
    return bytes_of(tensor).numpy().data
