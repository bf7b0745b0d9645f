# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 3)
        self.fc = nn.Linear(3 * 8, 2)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        print("after conv:", x.shape)
        x = x.view(x.size(0), -1)
        print("flat:", list(x.size()), "mean", x.mean().item())
        return self.fc(x)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    out = net(torch.randn(6, 1, 10))
    print("outside:", out.shape)
    loss = out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("loss", loss.item())
