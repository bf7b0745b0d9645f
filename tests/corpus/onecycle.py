# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

torch.set_default_dtype(torch.float64)
torch.manual_seed(1234)
x, y = torch.rand(101, 2) * 2 - 1, None
y = torch.where(x.norm(dim=1) < 0.7, 1, 0)
loader = torch.utils.data.DataLoader(list(zip(x, y)), batch_size=20, shuffle=True)
net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
epochs = 3
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
sched = OneCycleLR(opt, max_lr=0.5, steps_per_epoch=len(loader), epochs=epochs)
lrs, momenta = [], []
for epoch in range(epochs):
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        lrs.append(sched.get_last_lr()[0])
        momenta.append(opt.param_groups[0]["momentum"])
    print(f"Epoch {epoch} loss {loss.item():.12g} lr {lrs[-1]:.12g} momentum {momenta[-1]:.12g}")
print("highest lr at step", lrs.index(max(lrs)), "of", len(lrs))
print("accuracy", (net(x).argmax(1) == y).float().mean().item())
