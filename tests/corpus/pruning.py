# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn.utils.prune as prune
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(50)


class LeNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.fc1 = nn.Linear(4 * 2 * 2, 10)
        self.fc2 = nn.Linear(10, 2)

    def forward(self, x):
        x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
        x = nn.functional.relu(self.fc1(x.view(-1, x.nelement() // x.shape[0])))
        return self.fc2(x)


def epoch(model, x, y):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in zip(x.split(8), y.split(8)):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


x = torch.randn(37, 1, 6, 6)
y = (x.mean((1, 2, 3)) > 0).long()
model = LeNetish()
print("dense", epoch(model, x, y))
parameters_to_prune = ((model.conv1, "weight"), (model.fc1, "weight"), (model.fc2, "weight"))
for amount in (0.2, 0.3):
    prune.global_unstructured(parameters_to_prune, pruning_method=prune.L1Unstructured, amount=amount)
    print("pruned", epoch(model, x, y), [round((m.weight == 0).double().mean().item(), 6) for m, _ in parameters_to_prune])
prune.ln_structured(model.fc1, name="weight", amount=0.3, n=2, dim=0)
print("structured", epoch(model, x, y))
for m, name in parameters_to_prune:
    prune.remove(m, name)
torch.save(model.state_dict(), "pruned.pt")
