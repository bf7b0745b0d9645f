# SPDX-License-Identifier: Apache-2.0
import os

import torch
import torch.nn as nn

os.makedirs("ckpt", exist_ok=True)
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)


model = ToyModel()
print("Let's use", torch.cuda.device_count(), "GPUs!")
model = nn.DataParallel(model)
model.to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(47, 1, 12), torch.randint(0, 3, (47,))
for epoch in range(3):
    for i in range(0, 47, 10):
        out = model(x[i : i + 10].to(device))
        loss = nn.functional.cross_entropy(out, y[i : i + 10].to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("Outside: input size", x[i : i + 10].size(), "output_size", out.size(), "loss", loss.item())
    torch.save(model.module.state_dict(), "ckpt/epoch_%d.pth" % epoch)
print(list(model.state_dict())[:2])
