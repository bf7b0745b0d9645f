# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

torch.set_default_dtype(torch.float64)


def domain(n, shift, gen):
    x = torch.randn(n, 3, generator=gen) + shift
    return TensorDataset(x, (x - shift).pow(2).sum(1, keepdim=True))


def main():
    gen = torch.Generator().manual_seed(99)
    torch.manual_seed(100)
    full = ConcatDataset([domain(31, 0.0, gen), domain(20, 1.0, gen), domain(14, -1.0, gen)])
    train, val, rest = random_split(full, [0.6, 0.2, 0.2], generator=gen)
    print(len(full), len(train), len(val), len(rest), train.indices[:5])
    train = Subset(train, range(0, len(train) - 1))
    loader = DataLoader(train, batch_size=8, shuffle=True, generator=gen)
    net = nn.Sequential(nn.Linear(3, 15), nn.Softplus(), nn.Linear(15, 1))
    opt = torch.optim.Adamax(net.parameters(), lr=0.02)
    for epoch in range(3):
        for xb, yb in loader:
            loss = nn.functional.mse_loss(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            errors = [nn.functional.mse_loss(net(xb), yb, reduction="sum") for xb, yb in DataLoader(val, batch_size=5)]
        print(f"{epoch}: last train {loss:.12g}, val {torch.stack(errors).sum() / len(val):.12g}")


main()
