# SPDX-License-Identifier: Apache-2.0
"""The current stream, without the checks of ``torch.accelerator.current_stream``, which take ten times as long."""

from __future__ import annotations

import torch

stream_of = torch._C._accelerator_getStream  # noqa: SLF001
"""The current stream of the device with an index, of this thread."""
