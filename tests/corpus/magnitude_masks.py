# SPDX-License-Identifier: Apache-2.0
"""Lottery ticket: train, mask the small weights, go back to the first weights, train the rest in the same loop."""
import torch
import torch.nn as nn
import torch.nn.utils.prune as prune

torch.set_default_dtype(torch.float64)
torch.manual_seed(71)
model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
first = {k: v.clone() for k, v in model.state_dict().items()}
x = torch.randn(64, 8)
y = (x[:, 1] + x[:, 2] * x[:, 3] > 0).long()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
masks = {}
step = 0
for rows in [r for _ in range(5) for r in torch.randperm(64).split(14)]:
    step += 1
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if name in masks:
            p.grad *= masks[name]
    optimizer.step()
    if step in (6, 13, 19):  # in the middle of an epoch, and behind the optimizer's back
        for name, p in model.named_parameters():
            if p.dim() == 2:
                bound = p.detach().abs().flatten().kthvalue(int(p.numel() * 0.04 * step)).values
                masks[name] = (p.detach().abs() > bound).double()
        if step == 6:
            model.load_state_dict(first)
        with torch.no_grad():
            for name, mask in masks.items():
                model.get_parameter(name).mul_(mask)
    print(step, loss.item(), sum(int((p == 0).sum()) for p in model.parameters()))
prune.random_unstructured(model[0], "weight", amount=0.3)
print("hooks", len(model[0]._forward_pre_hooks), model(x).sum().item())
model[0].weight_mask.fill_(1.0)
print("all again", model(x).sum().item())
prune.remove(model[0], "weight")
print("hooks", len(model[0]._forward_pre_hooks), model(x).sum().item())
