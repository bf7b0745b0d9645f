# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
from sklearn.datasets import make_circles

torch.set_default_dtype(torch.float64)
torch.manual_seed(90)
X, y = make_circles(76, noise=0.1, factor=0.4, random_state=0)
X, y = torch.tensor(X), torch.tensor(y)
models = [
    nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2)) for width in (5, 9, 14)
]
optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(models, (0.05, 0.02, 0.02))]
for epoch in range(3):
    bags = [torch.randint(0, 60, (60,)) for _ in models]
    for model, optimizer, bag in zip(models, optimizers, bags):
        model.train()
        for rows in bag.split(14):
            loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        for m in models:
            m.eval()
        votes = torch.stack([m(X[60:]).softmax(1) for m in models])
    mean = votes.mean(0)
    print(
        "epoch", epoch, "single", [round((v.argmax(1) == y[60:]).double().mean().item(), 6) for v in votes],
        "ensemble", (mean.argmax(1) == y[60:]).double().mean().item(), "entropy", -(mean * mean.log()).sum(1).mean().item(),
    )
