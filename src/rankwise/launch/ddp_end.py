# SPDX-License-Identifier: Apache-2.0
"""Has a model of torch's DDP freed in an order in which it can be, in a rank that the launcher started.

Where a script destroys its group first, DDP's reducer is the last to release it, and waits for gloo's threads while it
holds the interpreter's lock. Such a thread may be waiting for the lock: it has just carried out a collective of
backward, and frees what that kept of Python. Then neither continues, and the rank never ends. Imported by the worker.
"""

from __future__ import annotations

import functools
from typing import Any


def follow() -> None:
    """Have models of DDP that are made from now on release their group last, which gives the lock back meanwhile."""
    # In memory already in a rank; a process that only starts ranks need not wait for torch.
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    initialize = DistributedDataParallel.__init__

    @functools.wraps(initialize)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - torch's
        initialize(self, *args, **kwargs)
        # Attributes are freed in the order in which they were set.
        attributes = vars(self)
        attributes["process_group"] = attributes.pop("process_group")

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]
