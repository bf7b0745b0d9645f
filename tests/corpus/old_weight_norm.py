# SPDX-License-Identifier: Apache-2.0
"""The older torch.nn.utils.weight_norm and spectral_norm, which set .weight before each call."""
import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.set_default_dtype(torch.float64)
torch.manual_seed(47)


class TCNBlock(nn.Module):
    def __init__(self, i, o, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv = nn.utils.weight_norm(nn.Conv1d(i, o, 3, dilation=dilation))
        self.down = nn.Conv1d(i, o, 1) if i != o else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return torch.relu(self.drop(torch.relu(self.conv(self.pad(x)))) + self.down(x))


tcn = nn.Sequential(TCNBlock(1, 6, 1), TCNBlock(6, 6, 2))
head = nn.utils.spectral_norm(nn.Linear(6, 1))
opt = torch.optim.Adam([*tcn.parameters(), *head.parameters()], lr=0.01)
for step in range(7):
    x = torch.randn(10, 1, 16)
    y = x.cumsum(2)[:, 0, -1:].tanh()
    loss = nn.functional.mse_loss(head(tcn(x)[:, :, -1]), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(step, loss.item(), head.weight.norm().item())
tcn.eval(), head.eval()
print(head(tcn(torch.ones(5, 1, 16))[:, :, -1]).sum().item())
nn.utils.remove_weight_norm(tcn[0].conv)
torch.save(tcn.state_dict(), "tcn.pt")
