# SPDX-License-Identifier: Apache-2.0
from contextlib import contextmanager

import torch


class Trail:
    """Weights that come after the net's with a delay, and take their place for a while."""

    def __init__(self, net, pace):
        self.weights, self.pace = list(net.parameters()), pace
        self.behind = [weight.detach().clone() for weight in self.weights]

    def pull(self):
        for late, weight in zip(self.behind, self.weights):
            late += self.pace * (weight.detach() - late)

    @contextmanager
    def in_place(self):
        own = [weight.data for weight in self.weights]
        self._put(self.behind)
        try:
            yield
        finally:
            self._put(own)

    def _put(self, tensors):
        for weight, tensor in zip(self.weights, tensors):
            weight.data = tensor


torch.set_default_dtype(torch.float64)
torch.manual_seed(77)
net = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
trail = Trail(net, 0.2)
opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
x = torch.randn(114, 4)
y = x.norm(dim=1, keepdim=True)
for epoch in range(3):
    for rows in torch.randperm(83).split(9):
        loss = torch.nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad(); loss.backward(); opt.step(); trail.pull()
    now = torch.nn.functional.mse_loss(net(x[83:]), y[83:])
    with trail.in_place():
        late = torch.nn.functional.mse_loss(net(x[83:]), y[83:])
    print(f"{epoch}: {now.item():.13g} with the weights of now, {late.item():.13g} with those behind")
torch.save(trail.behind, "behind.bin")
