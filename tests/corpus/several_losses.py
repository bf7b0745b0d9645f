# SPDX-License-Identifier: Apache-2.0
"""retain_graph, two losses of one output, outputs of one call used apart, and a graph that is kept for later."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(131)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 11), nn.Tanh())
        self.a, self.b, self.spare = nn.Linear(11, 2), nn.Linear(11, 1), nn.Linear(11, 1)

    def forward(self, x):
        h = self.trunk(x)
        return {"a": self.a(h), "b": self.b(h), "h": h, "spare": self.spare(h)}


model = TwoHeads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(51, 5)
kind, value = (x[:, 0] > 0).long(), x.sum(1, keepdim=True)


def norms():
    return [0.0 if p.grad is None else p.grad.norm().item() for p in model.parameters()][::2]


for step, rows in enumerate(torch.randperm(51).split(9)):
    optimizer.zero_grad()
    out = model(x[rows])
    one = nn.functional.cross_entropy(out["a"], kind[rows])
    two = nn.functional.mse_loss(out["b"], value[rows])
    if step % 3 == 0:
        one.backward(retain_graph=True)
        between = norms()
        two.backward()
    elif step % 3 == 1:
        two.backward(retain_graph=True)
        between = norms()
        (0.5 * one).backward(retain_graph=True)
        (0.5 * one + 0.1 * out["h"].square().mean()).backward()
    else:
        one.backward()  # the other outputs of this call are never used
        between = norms()
    optimizer.step()
    print(step, one.item(), two.item(), between, norms())
try:
    one.backward()
except RuntimeError as error:
    print("twice:", type(error).__name__)
# two calls, backward in the other order, and one forgotten
optimizer.zero_grad()
first, forgotten, second = model(x[:8])["a"].sum(), model(x[8:20])["b"].sum(), model(x[20:33])["b"].square().sum()
second.backward()
first.backward()
print(norms(), forgotten.requires_grad)
# gradients add up over calls, from tensors of one output
optimizer.zero_grad()
torch.autograd.backward([model(x)["a"], model(x)["h"]], [torch.ones(51, 2), torch.full((51, 11), 0.1)])
print(norms())
saved = model(x)["b"].mean()
optimizer.zero_grad()
for _ in range(3):
    saved.backward(retain_graph=True)
print(norms())
optimizer.step()
try:
    saved.backward()  # a weight has been changed in place since
except RuntimeError as error:
    print("in place:", type(error).__name__)
