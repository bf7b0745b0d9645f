# SPDX-License-Identifier: Apache-2.0
"""One step of two workers and a parameter server, against torch's tutorial: a server over torch.distributed.rpc.

The same three processes are both, in turn, one thread per rank. Every step is the mean of both workers' gradients, one
update on the server, and the parameters back on the workers. Both sides move tensors through the memory of the host.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS
from torch.distributed import rpc

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World

NUM_WORKERS = 2
NUM_STEPS = 10
ROUNDS = 12
WARM_UP_ROUNDS = 2
SERVER = "server"
REACH = 1.0


class RpcServer:
    """The batched parameter server of torch's tutorial on asynchronous execution, with this benchmark's model."""

    own: RpcServer

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, _ = MODELS[name]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.lock = threading.Lock()
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.num_come = 0

    @staticmethod
    @rpc.functions.async_execution
    def update_and_fetch(gradients: list[torch.Tensor]) -> torch.futures.Future[list[torch.Tensor]]:
        """Add up gradients; the last of a step updates the parameters and answers all workers."""
        own = RpcServer.own
        with own.lock:
            for parameter, gradient in zip(own.model.parameters(), gradients, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(gradient, alpha=1 / NUM_WORKERS)
            own.num_come += 1
            future = own.future
            if own.num_come == NUM_WORKERS:
                own.num_come = 0
                own.optimizer.step()
                own.optimizer.zero_grad(set_to_none=False)
                own.future = torch.futures.Future()
                future.set_result([parameter.detach() for parameter in own.model.parameters()])
        return future


def compare(world: World, name: str, rendezvous: str) -> dict[str, list[float]]:
    """Return seconds per step of both sides, round by round."""
    build = MODELS[name]
    torch.manual_seed(0)
    model, shape = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    server = rw.parameter_server(model, optimizer, servers=1)
    torch.manual_seed(0)
    plain, _ = build()
    RpcServer.own = RpcServer(name)
    rpc.init_rpc(
        SERVER if server.is_server else f"worker{world.rank}",
        rank=world.rank,
        world_size=world.world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}"),
    )
    x = torch.randn(shape)

    def step_ours() -> float:
        dist.barrier()
        started = time.perf_counter()
        if server.is_server:
            server.serve()
        else:
            for _ in range(NUM_STEPS):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        spent = (time.perf_counter() - started) / NUM_STEPS
        server.finish()
        return spent

    def step_peers() -> float:
        dist.barrier()
        started = time.perf_counter()
        if not server.is_server:
            for _ in range(NUM_STEPS):
                plain(x).square().mean().backward()
                gradients = [parameter.grad for parameter in plain.parameters()]
                fetched = rpc.rpc_sync(SERVER, RpcServer.update_and_fetch, args=(gradients,))
                with torch.no_grad():
                    for parameter, value in zip(plain.parameters(), fetched, strict=True):
                        parameter.copy_(value)
                plain.zero_grad()
        dist.barrier()
        return (time.perf_counter() - started) / NUM_STEPS

    sides: dict[str, Callable[[], float]] = {"ours": step_ours, "rpc": step_peers}
    interleaved(sides, WARM_UP_ROUNDS)
    figures = interleaved(sides, ROUNDS)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    difference = max((ours - theirs).detach().abs().max().item() for ours, theirs in pairs)
    if not server.is_server and difference > 1e-4:
        raise RuntimeError(f"the two sides trained apart by {difference}")
    rpc.shutdown()
    return figures


def measure() -> list[Row]:
    """Return the rows."""
    rows: list[Row] = []
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(compare, NUM_WORKERS + 1, name, f"{folder}/rpc", timeout_seconds=300)
        found = results[0].get()
        rows.append(
            Row(
                f"step, parameter server, 2 workers, {name}, against torch.distributed.rpc",
                seconds(statistics.median(found["ours"])),
                seconds(statistics.median(found["rpc"])),
                median_ratio(found["ours"], found["rpc"]),
                REACH,
            )
        )
    return rows


if __name__ == "__main__":
    show(measure())
