# SPDX-License-Identifier: Apache-2.0
"""Single precision at first; then model, optimizer state and data move on to double. Exact numbers until then."""
import torch
from torch import nn

torch.manual_seed(67)
net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
with torch.no_grad():
    for p in net.parameters():
        p.copy_(torch.randint(-2, 3, p.shape))
x = torch.randint(-2, 3, (40, 3)).float()
y = x.abs().sum(1, keepdim=True)
before = [net(rows).sum().item() for rows in x.split(12)]  # whole numbers
print(before, next(net.parameters()).dtype)
loss = nn.functional.l1_loss(net(x), y, reduction="sum")
loss.backward()
print(loss.item(), [p.grad.sum().item() for p in net.parameters()])

names = [id(p) for p in net.parameters()]
net = net.to(torch.float64)
x, y = x.double() + torch.rand(40, 3, dtype=torch.float64), y.double()
print("same parameters", names == [id(p) for p in net.parameters()], [p.grad.dtype for p in net.parameters()])
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(3):
    for rows in torch.randperm(40).split(9):
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.dtype, loss.item())
net.to("cpu", non_blocking=True)
net.to(memory_format=torch.channels_last)
print(net(x).mean().item())
net[0].to(torch.float32)
try:
    net(x)
except RuntimeError as error:
    print("refused:", type(error).__name__, "dtype" in str(error))
net[0].double()
for p in net.parameters():
    p.requires_grad_(False)
net[2].to_empty(device="cpu")
nn.init.constant_(net[2].weight, 0.5)
nn.init.constant_(net[2].bias, -1.5)
print(net(x).mean().item(), net(x).requires_grad)
