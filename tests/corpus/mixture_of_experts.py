# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
import torch.nn.functional as F


class SparseMoE(nn.Module):
    """Top-k gating with noise (Shazeer et al. 2017), importance loss over the whole batch."""

    def __init__(self, d, n_experts=4, k=2):
        super().__init__()
        self.k = k
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, 12), nn.ReLU(), nn.Linear(12, d)) for _ in range(n_experts)])
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.noise = nn.Linear(d, n_experts, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        top, idx = logits.topk(self.k, dim=-1)
        gates = torch.zeros_like(logits).scatter(-1, idx, top.softmax(-1))
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = gates[:, e].nonzero().flatten()
            if rows.numel():
                y = y.index_add(0, rows, gates[rows, e, None] * expert(x[rows]))
        importance = gates.sum(0)
        aux = importance.var() / (importance.mean() ** 2 + 1e-10)
        return y, aux


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 10)
        self.moe = SparseMoE(10)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        h, aux = self.moe(self.inp(x))
        return self.out(h), aux


torch.set_default_dtype(torch.float64)
torch.manual_seed(64)
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
w = torch.randn(5, 3)
for step in range(9):
    x = torch.randn(26, 5)
    y = (x @ w).argmax(1)
    logits, aux = net(x)
    loss = F.cross_entropy(logits, y) + 0.01 * aux
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 2:
        print(f"step {step}: loss={loss.item():.12g} aux={aux.item():.12g}")
net.eval()
x = torch.randn(101, 5)
with torch.no_grad():
    print("accuracy", ((net(x)[0].argmax(1) == (x @ w).argmax(1)).sum() / 101).item())
