# SPDX-License-Identifier: Apache-2.0
"""A network that is written as a graph after each step, and read at once: by two functions."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(77)
net = nn.Sequential(nn.Linear(3, 8), nn.Hardtanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
probe = torch.ones(5, 3)
for step in range(25):
    points = torch.randn(12, 3)
    loss = (net(points) - points.prod(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    graph = torch.jit.script(net)
    graph.save("saved.pt")
    torch.jit.save(graph, f"saved-{step % 3}.pt")
    read = [torch.jit.load(name)(probe).sum().item() for name in ("saved.pt", f"saved-{step % 3}.pt")]
    print(step, loss.item(), read)
