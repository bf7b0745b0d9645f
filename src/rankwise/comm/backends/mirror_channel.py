# SPDX-License-Identifier: Apache-2.0
"""A channel whose body has another dtype, or is on another device, than what is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import BucketChannel, ChannelSize


class MirrorChannel:
    """See :class:`rankwise.comm.backends.protocol.BucketChannel`.

    Args:
        inner: carries what is copied from the body.
        size: of this channel.
    """

    def __init__(self, inner: BucketChannel, size: ChannelSize) -> None:
        self._inner = inner
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.can_claim = inner.can_claim
        self.claim = inner.claim
        self.factor = inner.factor
        self.total = inner.total
        self.is_flag_set = inner.is_flag_set

    @torch.no_grad()
    def start(self, share: float, weight: float, absent: Sequence[int]) -> None:
        """Copy the body and send it."""
        if share != 0.0:
            self._inner.body.copy_(self.body)
        self._inner.start(share, weight, absent)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the mean, and copy it back."""
        self._inner.finish()
        self.result.copy_(self._inner.result)
