# SPDX-License-Identifier: Apache-2.0
"""Has torch's groups held past ``destroy_process_group()``, in a rank that the launcher started.

For scripts that call it themselves, whose DDP model is freed later: without it their process may never end. Imported by
the worker.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def follow() -> None:
    """Replace ``torch.distributed.destroy_process_group`` in this process."""
    # In memory already in a rank; whoever only starts ranks need not wait for torch.
    import torch.distributed as dist  # noqa: PLC0415

    from rankwise.exchange.kept_groups import hold_groups  # noqa: PLC0415

    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: ProcessGroup | None = None) -> None:
        hold_groups()
        destroy(group)

    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group
