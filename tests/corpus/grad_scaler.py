# SPDX-License-Identifier: Apache-2.0
"""torch.amp.GradScaler on the CPU: skipped steps, unscaled clipping, and a scale that falls and grows."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(139)
model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
x = torch.randn(60, 4)
y = x.abs().max(1, keepdim=True).values
for step in range(14):
    rows = torch.randperm(60)[:17]
    with torch.autocast("cpu", enabled=False):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    if step in (4, 5, 10):
        loss = loss * float("inf")  # as an overflow would
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = model[0].weight.sum().item()
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item(), norm.item(), "stepped", before != model[0].weight.sum().item(), "scale", scaler.get_scale())
torch.save(scaler.state_dict(), "scaler.pt")
print([p.sum().item() for p in model.parameters()])
