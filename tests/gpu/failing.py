# SPDX-License-Identifier: Apache-2.0
"""The part in which a rank is late, one is killed, and a communicator is aborted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from promise import parameters_of
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from setting import Check, compared
from torch import nn

import rankwise as rw
from rankwise.errors import PeerFailed, PeerMissing
from rankwise.testing import kill_self, run_ranks

if TYPE_CHECKING:
    from setting import Setting

    from rankwise.world.facts import World

LATE_SECONDS = 1.0
NAMED_SECONDS = 5.0
QUEUED_SECONDS = 3.0
RELEASED_SECONDS = 20.0


def _train(world: World, event: str) -> Parameters:
    """Train for six steps; before the backward of the fourth, rank 1 is late or killed."""
    model = rw.replicate(built(Net).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches((8,) * 6)):
        own = [part(one, world.rank, world.world_size).to(world.device) for one in (x, y)]
        loss = nn.functional.mse_loss(model(own[0]), own[1])
        if step == 3 and world.rank == 1:
            if event == "late":
                time.sleep(LATE_SECONDS)
            elif event == "killed":
                kill_self()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return parameters_of(model)


def _late(setting: Setting) -> str:
    options = setting.any_backend(2)
    expected, found = (
        [result.get() for result in run_ranks(_train, 2, event, **options)] for event in ("none", "late")
    )
    difference = max(largest_difference(one, expected[0]) for one in found)
    return f"{compared(difference, TOLERANCE)}, {_words(options)}"


def _killed(setting: Setting) -> str:
    options = setting.any_backend(2)
    survivor, killed = run_ranks(_train, 2, "killed", **options)
    seconds = survivor.seconds - killed.seconds
    error = survivor.error
    assert isinstance(error, PeerFailed | PeerMissing), repr(error)
    assert ([error.rank] if isinstance(error, PeerFailed) else list(error.ranks)) == [1], str(error)
    assert seconds < NAMED_SECONDS, f"rank 1 is named after {seconds:.1f} s"
    return f"named after {seconds:.1f} s, {_words(options)}"


def _words(options: dict[str, str | None]) -> str:
    return "through Gloo on the one device" if options.get("backend") == "gloo" else "through the device's backend"


def _abort(world: World) -> float:
    """Abort the group while a collective waits in the queue of the device; return seconds until it is free."""
    matrix = torch.eye(8192, dtype=torch.float64, device=world.device)
    torch.accelerator.synchronize()
    began = time.monotonic()
    matrix @ matrix
    torch.accelerator.synchronize()
    product_seconds = time.monotonic() - began
    for _ in range(int(QUEUED_SECONDS / product_seconds) + 1):
        matrix = matrix @ matrix
    dist.all_reduce(matrix, async_op=True)
    group = dist.group.WORLD
    assert group is not None
    aborting = threading.Thread(target=group.abort)
    began = time.monotonic()
    aborting.start()
    torch.accelerator.synchronize()
    aborting.join(RELEASED_SECONDS)
    assert not aborting.is_alive(), "abort() does not return"
    return time.monotonic() - began


def _abort_releases(setting: Setting) -> str:
    setting.needs_cuda()
    seconds = setting.alone(_abort)
    assert seconds < RELEASED_SECONDS, f"the main thread is free after {seconds:.1f} s"
    return f"main thread free after {seconds:.1f} s of {QUEUED_SECONDS:.0f} s queued"


FAILURES = [
    Check(f"a rank {LATE_SECONDS:.0f} s late trains on", _late),
    Check(f"a killed rank is named within {NAMED_SECONDS:.0f} s", _killed),
    Check("abort with a collective in the queue, 1 rank", _abort_releases),
]
