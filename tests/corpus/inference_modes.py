# SPDX-License-Identifier: Apache-2.0
"""One model under no_grad, inference_mode, set_grad_enabled, with frozen parts and detached inputs, in every order."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(157)
model = nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.25), nn.GELU(), nn.Linear(12, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
x = torch.randn(49, 5)
y = (x.sum(1) > 0).long()


@torch.inference_mode()
def predict(rows):
    model.eval()
    scores = model(x[rows])
    model.train()
    return scores


@torch.no_grad()
def validate(rows):
    return nn.functional.cross_entropy(model(x[rows]), y[rows]).item()


for step, rows in enumerate(torch.cat([torch.randperm(49) for _ in range(2)]).split(11)):
    scores = predict(rows)
    print(step, scores.is_inference(), scores.requires_grad, scores.argmax(1).float().mean().item(), validate(rows))
    with torch.set_grad_enabled(step % 4 != 2):
        out = model(x[rows])
        loss = nn.functional.cross_entropy(out, y[rows])
    print("  ", out.requires_grad, loss.item())
    if loss.requires_grad:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step == 4:
        model[0].requires_grad_(False)
    if step == 6:
        model[0].bias.requires_grad_(True)
for p in model.parameters():
    p.requires_grad_(False)
out = model(x)
print("all frozen:", out.requires_grad, out.sum().item())
given = x.clone().requires_grad_()
model(given).sum().backward()
print("into the input:", given.grad.norm().item(), [p.grad is None for p in model.parameters()])
with torch.inference_mode():
    kept = x * 2
    print(model(kept).is_inference(), model(kept).sum().item())
with torch.no_grad():
    print(model(kept).is_inference(), kept.is_inference(), model(kept).shape)
torch.set_grad_enabled(False)
model.requires_grad_(True)
print(model(x).requires_grad)
torch.set_grad_enabled(True)
print(model(x).requires_grad, torch.is_inference_mode_enabled())
