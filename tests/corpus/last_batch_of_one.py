# SPDX-License-Identifier: Apache-2.0
"""41 samples in batches of 8: the last batch has a single one; its BatchNorm sees only its pixels."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
x = torch.randn(41, 2, 5, 5)
y = x[:, 0].amax((1, 2)).unsqueeze(1)
net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(36, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.02)
for epoch in range(2):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=8):
        opt.zero_grad()
        loss = nn.MSELoss()(net(xb), yb)
        loss.backward()
        opt.step()
        print(len(xb), end=":")
        print(f"{loss.item():.10g}", end=" ")
    print()
print("running mean", net[1].running_mean.tolist())
net.eval()
print("one by one", sum(net(v.unsqueeze(0)).item() for v in x[:4]), "together", net(x[:4]).sum().item())
