# SPDX-License-Identifier: Apache-2.0
import torch
from torch import fx, nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.fc = nn.Linear(48, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.fc(x.flatten(1))


torch.set_default_dtype(torch.float64)
torch.manual_seed(73)
net = Net()
graph = fx.symbolic_trace(net)
print([n.op for n in graph.graph.nodes])
opt = torch.optim.SGD(graph.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(9, 1, 6, 6)
    loss = nn.functional.cross_entropy(graph(x), (x.sum((1, 2, 3)) > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
net.eval()
example = torch.randn(4, 1, 6, 6)
traced = torch.jit.trace(net, example)
traced.save("traced.pt")
loaded = torch.jit.load("traced.pt")
big = torch.randn(11, 1, 6, 6)
print(torch.allclose(loaded(big), net(big)), loaded(big).sum().item())
scripted_code = traced.code.count("relu")
print(scripted_code)
