# SPDX-License-Identifier: Apache-2.0
"""LoRA: after a first training, adapters take the place of two layers; only they are trained, then merged."""
import math

import torch
import torch.nn as nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=4.0, dropout=0.1):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.merged = False

    def forward(self, x):
        out = self.base(x)
        if self.merged:
            return out
        return out + self.dropout(x) @ self.A.t() @ self.B.t() * self.scaling

    def merge(self):
        self.base.weight.data += self.B @ self.A * self.scaling
        self.merged = True


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 12)
        self.q_proj = nn.Linear(12, 12)
        self.v_proj = nn.Linear(12, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        h = self.embed(x).relu()
        return self.out(torch.sigmoid(self.q_proj(h)) * self.v_proj(h))


def inject(model, targets):
    for name in targets:
        setattr(model, name, LoRALinear(getattr(model, name)))
    for n, p in model.named_parameters():
        p.requires_grad = ".A" in n or ".B" in n


def fit(model, x, y, lr, epochs):
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=lr)
    for epoch in range(epochs):
        for i in range(0, len(x), 16):
            loss = nn.functional.cross_entropy(model(x[i : i + 16]), y[i : i + 16])
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
        print(f"  {sum(p.numel() for p in params)} weights, epoch {epoch}, loss {loss.item():.14g}")


torch.manual_seed(47)
torch.set_default_dtype(torch.float64)
x = torch.randn(90, 7)
first, second = x[:, :3].argmax(1), x[:, 3:6].argmax(1)
model = Classifier()
print("pretraining")
fit(model, x, first, 0.02, 2)
inject(model, ["q_proj", "v_proj"])
print("adapters")
fit(model, x, second, 0.05, 3)
torch.save({n: p for n, p in model.state_dict().items() if ".A" in n or ".B" in n}, "adapter.pt")
model.eval()
with torch.no_grad():
    apart = model(x)
    for m in model.modules():
        if isinstance(m, LoRALinear):
            m.merge()
    merged = model(x)
print("merged:", (apart - merged).abs().max().item() < 1e-12, merged.sum().item())
print([n for n, p in model.named_parameters() if p.grad is not None])
