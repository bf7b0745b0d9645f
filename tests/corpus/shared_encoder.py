# SPDX-License-Identifier: Apache-2.0
"""Two models own one encoder; each has its optimizer; once both are called before either goes backward."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(113)
encoder = nn.Sequential(nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.ReLU())


class Task(nn.Module):
    def __init__(self, encoder, outputs):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(10, outputs)

    def forward(self, x):
        return self.head(self.encoder(x))


classify, regress = Task(encoder, 3), Task(encoder, 1)
opt_c = torch.optim.SGD(classify.parameters(), lr=0.1)
opt_r = torch.optim.Adam(regress.parameters(), lr=0.01)
x = torch.randn(64, 6)
kind, value = x[:, :3].argmax(1), x.pow(2).sum(1, keepdim=True)
for step, rows in enumerate(torch.cat([torch.randperm(64) for _ in range(3)]).split(13)):
    if step % 3 == 0:
        loss = nn.functional.cross_entropy(classify(x[rows]), kind[rows])
        opt_c.zero_grad()
        loss.backward()
        opt_c.step()
    elif step % 3 == 1:
        loss = nn.functional.mse_loss(regress(x[rows]), value[rows])
        opt_r.zero_grad()
        loss.backward()
        opt_r.step()
    else:
        scores, guess = classify(x[rows]), regress(x[rows])
        loss = nn.functional.cross_entropy(scores, kind[rows]) + 0.1 * nn.functional.mse_loss(guess, value[rows])
        opt_c.zero_grad()
        opt_r.zero_grad()
        loss.backward()
        opt_c.step()
        opt_r.step()
    print(step, loss.item(), encoder[1].running_mean.sum().item())
both = nn.ModuleDict({"c": classify, "r": regress})
print(len(list(both.parameters())), both["c"].encoder is both["r"].encoder)
torch.save({"c": classify.state_dict(), "r": regress.state_dict()}, "both.pt")
encoder.eval()
with torch.no_grad():
    encoder[0].weight[0] += 1
    print(classify(x).sum().item(), regress(x).sum().item(), encoder(x).sum().item())
