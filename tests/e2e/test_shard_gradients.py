# SPDX-License-Identifier: Apache-2.0
"""A stranger's comparison: each gradient of a sharded model with plain autograd's, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

SCRIPT = """
import contextlib
import torch
import rankwise as rw


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()


torch.manual_seed(0)
x, y = torch.randn(12, 5).double(), torch.randn(12, 3).double()
with rw.join() as world:
    for shares in ([3, 3], [4, 2], [6, 0]):
        for backwards in (1, 2):
            plain, model = net(), rw.shard(net())
            num_samples = 6 * backwards
            (plain(x[:num_samples]) - y[:num_samples]).square().mean().backward()
            for number in range(backwards):
                first = 6 * number + sum(shares[: world.rank])
                mine = slice(first, first + shares[world.rank])
                accumulates = number < backwards - 1
                with rw.no_sync(model) if accumulates else contextlib.nullcontext():
                    (model(x[mine]) - y[mine]).square().mean().backward()
            for sharded, whole in zip(model.parameters(), plain.parameters()):
                ratio = sharded.grad.full_tensor() / whole.grad
                rw.print(shares, backwards, f"{ratio.min():.6f} {ratio.max():.6f}")
"""


def test_every_ratio_to_plain_autograd_is_one(command: Command) -> None:
    command.write("compare.py", SCRIPT)
    ended = command.run("-n", "2", "compare.py")
    assert ended.returncode == 0, ended.stderr
    expected = [
        f"{shares} {backwards} 1.000000 1.000000"
        for shares in ([3, 3], [4, 2], [6, 0])
        for backwards in (1, 2)
        for _ in range(4)
    ]
    assert ended.stdout.splitlines() == expected
