# SPDX-License-Identifier: Apache-2.0
"""Has torch's own ``env://`` find the job's store, in a rank that the launcher started.

For scripts and libraries that call ``torch.distributed.init_process_group()`` themselves: the store wants the job's
secret, which torch's client does not know. Imported by the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rankwise import environments
from rankwise.launch.absences import torch_rank_key
from rankwise.torch_private.rendezvous import replace_handler

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    import torch.distributed as dist

    from rankwise.store import Store


_kept: list[Store] = []
"""Torch keeps only its own half of a store that is written in Python."""


def serve_env_scheme() -> None:
    """Replace torch's handler of ``env://`` in this process."""
    replace_handler("env", _env_handler)


def _env_handler(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:  # noqa: ANN401 - torch's
    # In memory already in a rank; whoever only starts ranks need not wait for torch.
    from rankwise import store  # noqa: PLC0415

    reading = environments.read_process()
    if reading.address is None or reading.secret is None:
        message = "the variables of rankwise's launcher are gone from this process"
        raise RuntimeError(message)
    asked = parse_qs(urlsplit(url).query)
    rank = int(asked["rank"][0]) if "rank" in asked else reading.rank
    world_size = int(asked["world_size"][0]) if "world_size" in asked else reading.world_size
    limit = {} if timeout is None else {"timeout_seconds": timeout.total_seconds()}
    opened = store.connect(*reading.address, **limit, secret=reading.secret.encode())
    _kept.append(opened)
    opened.set(f"attempt/{reading.attempt}/{torch_rank_key(rank)}", "")
    yield opened.prefixed(f"attempt/{reading.attempt}/torch").torch_store, rank, world_size
    message = "env:// cannot be joined again under rankwise's launcher; it starts ranks anew after a failure"
    raise RuntimeError(message)
