# SPDX-License-Identifier: Apache-2.0
"""After a training in double precision, a part computes in bfloat16, one in half; the head continues in double."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(61)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.side = nn.Linear(6, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        body = self.body(x.to(self.body.weight.dtype)).to(x.dtype)
        side = self.side(x.to(self.side.weight.dtype)).to(x.dtype)
        return self.head(body.tanh() * side.sigmoid())


model = Parts()
# small whole numbers and weights of few bits: the parts of low precision are exact
x = torch.randint(-2, 3, (57, 6)).double()
y = (x[:, 0] > x[:, 5]).long()


def epoch(name, params, lr):
    opt = torch.optim.SGD(params, lr=lr)
    for rows in torch.randperm(57).split(13):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(name, [p.dtype for p in model.parameters()][::2], loss.item())


epoch("double", model.parameters(), 0.3)
with torch.no_grad():
    for layer in (model.body, model.side):
        for p in layer.parameters():
            p.copy_((p * 8).round() / 8)
model.body.bfloat16().requires_grad_(False)
epoch("bfloat16", [*model.side.parameters(), *model.head.parameters()], 0.3)
with torch.no_grad():
    for p in model.side.parameters():
        p.copy_((p * 8).round() / 8)
model.side.half().requires_grad_(False)
epoch("half, too", model.head.parameters(), 0.5)
model.double().requires_grad_(True)
epoch("double again", model.parameters(), 0.3)
