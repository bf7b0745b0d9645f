# SPDX-License-Identifier: Apache-2.0
"""Features tell what kind a sample is, but should not tell its room: the gradient of the room is turned round."""
import torch
from torch import nn


class Steps(torch.autograd.Function):
    """Rounds to eighths; the gradient is let through, but not where a value is too large for the scale."""

    @staticmethod
    def forward(ctx, values, number):
        inside = values.abs() <= 1
        ctx.save_for_backward(inside)
        return values.mul(number).round().div(number)

    @staticmethod
    def backward(ctx, slope):
        (inside,) = ctx.saved_tensors
        return torch.where(inside, slope, 0.0), None


class TurnedRound(torch.autograd.Function):
    """Changes nothing on the way forward; the way back is multiplied by a negative number."""

    @staticmethod
    def forward(ctx, values, strength):
        ctx.strength = strength
        return values.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope.mul(-ctx.strength), None


class KindAndRoom(nn.Module):
    def __init__(self):
        super().__init__()
        self.common = nn.Linear(4, 12)
        self.kind, self.room = nn.Linear(12, 2), nn.Linear(12, 2)

    def forward(self, samples, strength):
        common = Steps.apply(self.common(samples).tanh(), 8.0)
        return self.kind(common), self.room(TurnedRound.apply(common, strength))


torch.set_default_dtype(torch.float64)
torch.manual_seed(58)
net = KindAndRoom()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
here = torch.randn(50, 4)
there = torch.randn(50, 4) + 0.5
kinds = (here[:, 0] > 0).long()
strength = 0.0
for epoch in range(3):
    for known, other, kind in zip(here.split(9), there.split(9), kinds.split(9)):
        strength += 0.05
        told, room_of_known = net(known, strength=strength)
        _, room_of_other = net(other, strength=strength)
        rooms = torch.cat([room_of_known, room_of_other])
        where = torch.arange(len(rooms)).ge(len(known)).long()
        loss = nn.functional.cross_entropy(told, kind) + 2 * nn.functional.cross_entropy(rooms, where)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} strength {strength:.4f} loss {loss.item():.12g}")
