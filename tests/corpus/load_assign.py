# SPDX-License-Identifier: Apache-2.0
"""Best weights are kept and loaded with assign=True, a model starts on meta, and tensors are swapped by hand."""
import copy

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(59)


def build(device="cpu"):
    return nn.Sequential(
        nn.Linear(4, 10, device=device), nn.BatchNorm1d(10, device=device), nn.ReLU(), nn.Linear(10, 2, device=device)
    )


def epochs(model, number):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(number):
        for rows in torch.randperm(48).split(13):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def score(model):
    model.eval()
    with torch.no_grad():
        value = nn.functional.cross_entropy(model(x), y).item()
    model.train()
    return value


x = torch.randn(48, 4)
y = (x.pow(2).sum(1) > 3.5).long()
model = build()
print("trained", epochs(model, 2), score(model))
kept = copy.deepcopy(model.state_dict())
print("further", epochs(model, 2), score(model))
model.load_state_dict(kept, assign=True)
print("back", score(model), model[0].weight is not kept["0.weight"], model[0].weight.data_ptr() == kept["0.weight"].data_ptr())
print("again", epochs(model, 1), score(model))
print("the kept ones moved along:", kept["0.weight"].sum().item())

late = build("meta")
late.load_state_dict({name: tensor.clone() for name, tensor in kept.items()}, assign=True)
late.requires_grad_(True)
print("from meta", score(late), epochs(late, 1), score(late))

torch.save(late.state_dict(), "late.pt")
late.load_state_dict(torch.load("late.pt", mmap=True), assign=True)
print("mapped", score(late))
late[0].weight.data = late[0].weight.data.flip(0)
print("flipped", score(late))
late[3].weight.data, kept["3.weight"] = kept["3.weight"], late[3].weight.data
print("swapped", score(late), epochs(late, 1))
with torch.no_grad():
    late[3].bias.set_(torch.tensor([0.5, -0.5]))
print("set", score(late))
