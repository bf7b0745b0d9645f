# SPDX-License-Identifier: Apache-2.0
"""Outputs are changed in place before the loss, outputs are (views of) inputs, inputs are changed after the call."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(151)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, mask=None):
        out = self.b(self.a(x).tanh())
        return {"out": out, "same": x, "mask": mask, "first": x[:, 0], "constant": 3}


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.2)
x = torch.randn(53, 4)
y = x[:, :3].clone()
mask = torch.rand(53, 3) > 0.2
for step, rows in enumerate(torch.randperm(53).split(9)):
    given = x[rows]
    result = net(given, mask=mask[rows])
    out = result["out"]
    kept = out.detach().clone()
    out.clamp_(-0.9, 0.9)
    out[result["mask"].logical_not()] = 0
    out[:, 2] *= 2
    loss = nn.functional.mse_loss(out, y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    changed = (kept != out).sum().item()
    print(step, loss.item(), changed, result["same"] is given, result["constant"])
    given.zero_()
    print("  input is", result["same"].sum().item(), result["first"].sum().item(), out.is_leaf, out.requires_grad)

with torch.no_grad():
    out = net(x)["out"]
    out.softmax(1).add_(1)
    out.sub_(out.mean(0))
    out += net(x)["out"]
    print(out.sum().item(), out.abs().max().item())
# the input is changed between forward and backward: torch refuses where it was needed
for name, change in {"read": lambda t: t.sum(), "written": lambda t: t.mul_(2)}.items():
    given = x.clone()
    loss = net(given)["out"].square().mean()
    change(given)
    net.zero_grad()
    try:
        loss.backward()
        print(name, net.a.weight.grad.norm().item())
    except RuntimeError as error:
        print(name, type(error).__name__)
flat = nn.Sequential(nn.Identity(), nn.Flatten())
print(flat(x).data_ptr() == x.data_ptr(), nn.Dropout(0.0)(x).sum().item())
