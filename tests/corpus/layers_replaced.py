# SPDX-License-Identifier: Apache-2.0
"""A net that grows: its head is replaced, a layer is appended, one is taken out, two change places."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(53)


class Grower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 12), nn.Tanh())
        self.blocks = nn.ModuleList()
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        x = self.body(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


net = Grower()
x = torch.randn(61, 5)
y = (x[:, :1] * x[:, 1:2]).sin()
opt = torch.optim.Adam(net.parameters(), lr=0.01)


def epoch(name):
    for rows in torch.randperm(61).split(15):
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"{name}: {len(list(net.parameters()))} tensors, loss {loss.item():.15g}")


epoch("small")
for width in (6, 9):
    block = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 12))
    nn.init.zeros_(block[2].weight)
    net.blocks.append(block)
    opt.add_param_group({"params": block.parameters(), "lr": 0.02})
    epoch(f"with a block of {width}")
net.head = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.01)
epoch("with another head")
net.blocks[0], net.blocks[1] = net.blocks[1], net.blocks[0]
epoch("blocks in another order")
net.body[1] = nn.ELU(0.5)
epoch("with another activation")
del net.blocks[0]
epoch("without a block")
net.body.append(nn.Dropout(0.2))
net.head[1].weight = nn.Parameter(net.head[1].weight.detach() * 2)
opt = torch.optim.Adam(net.parameters(), lr=0.01)
epoch("with dropout")
net.body[0].register_parameter("bias", None)
epoch("without a bias")
torch.save(net.state_dict(), "net.pt")
