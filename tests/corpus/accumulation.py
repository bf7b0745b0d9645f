# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation with a last group of fewer micro-batches."""
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
ACCUM = 3


def get_loaders():
    g = torch.Generator()
    g.manual_seed(0)
    X = torch.randn(47, 5, generator=g)
    y = X.prod(dim=1, keepdim=True).sign().clamp(min=0)
    return DataLoader(TensorDataset(X, y), batch_size=5, shuffle=True, generator=g)


def run():
    torch.manual_seed(17)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    loader = get_loaders()
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    criterion = torch.nn.BCEWithLogitsLoss()
    updates = 0
    for epoch in range(2):
        running = 0.0
        opt.zero_grad()
        for i, (xb, yb) in enumerate(loader):
            loss = criterion(net(xb), yb) / ACCUM
            loss.backward()
            running += loss.item() * ACCUM
            if (i + 1) % ACCUM == 0 or i + 1 == len(loader):
                total_norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
                opt.step()
                opt.zero_grad()
                updates += 1
                print(f"epoch {epoch} update {updates} grad norm {total_norm.item():.12g}")
        print(f"epoch {epoch} mean loss {running / len(loader):.12g}")
    return net


net = run()
torch.save({k: v for k, v in net.state_dict().items()}, "net.pth")
