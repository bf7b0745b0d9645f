# SPDX-License-Identifier: Apache-2.0
"""Which rate of learning? Each batch is learnt a little faster than the one before, until the loss runs away."""
import copy
import itertools

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(88)
points = torch.randn(66, 6)
heights = points[:, :1] - points[:, 1:2].square() / 2
batches = list(zip(points.split(13), heights.split(13)))
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)


def step(point, height):
    loss = nn.functional.mse_loss(net(point), height)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def tried(factor, number):
    """Yield rates, and losses smoothed over the batches before; net and optimizer are then as they were."""
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    faster = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: factor)
    smooth, lowest = None, float("inf")
    for batch in itertools.islice(itertools.cycle(batches), number):
        (rate,) = faster.get_last_lr()
        loss = step(*batch)
        smooth = loss if smooth is None else 0.7 * smooth + 0.3 * loss
        lowest = min(lowest, smooth)
        yield rate, smooth
        if smooth > 3 * lowest:
            print(f"at a rate of {rate:.10g} the loss has run away")
            break
        faster.step()
    net.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])


curve = list(tried(1.7, 20))
for rate, loss in curve[::3]:
    print(f"rate {rate:.12g} loss {loss:.12g}")
steady = curve[len(batches) :]  # by then each batch has had its turn
rate, _ = min(zip(steady, steady[1:]), key=lambda pair: pair[1][1] - pair[0][1])[0]
optimizer.param_groups[0]["lr"] = rate
print(f"chosen: {rate:.12g}")
print("losses with it:", *[f"{step(*batch):.12g}" for batch in batches])
