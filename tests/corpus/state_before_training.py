# SPDX-License-Identifier: Apache-2.0
"""A state_dict() taken before the training is no copy: it shows what became of the weights."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(89)
model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
state = model.state_dict()
copy = {name: tensor.clone() for name, tensor in state.items()}
weight = model[0].weight
view = weight[1, 0]
flat = weight.detach().view(-1)
mean = model[1].running_mean
named = dict(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(50, 1, 6, 6)
y = (x.mean((1, 2, 3)) > 0).long()
for epoch in range(2):
    for rows in torch.randperm(50).split(11):
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
for name, tensor in state.items():
    print(name, tensor.double().sum().item(), "moved", (tensor - copy[name]).double().abs().max().item())
print(view.sum().item(), flat[9:18].sum().item(), weight[1].sum().item())
print(mean is model[1].running_mean, mean.sum().item())
print(all(named[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items() if name in named))
print(sorted(optimizer.state[weight]), optimizer.state[weight]["momentum_buffer"].norm().item())
state["4.bias"].fill_(3.0)
flat[:9] = 0
print(model(x).sum().item(), model[4].bias.tolist(), weight[0].abs().sum().item())
model.load_state_dict(copy)
print(state["4.bias"].sum().item(), flat.sum().item(), nn.functional.cross_entropy(model(x), y).item())
torch.save({"before": copy, "now": state}, "states.pt")
