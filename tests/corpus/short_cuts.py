# SPDX-License-Identifier: Apache-2.0
"""A small net of blocks with short cuts; saves after each epoch, and starts from the newest file if there is one."""
import argparse
from pathlib import Path

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inward, outward, step):
        super().__init__()
        self.long = nn.Sequential(
            nn.Conv2d(inward, outward, 3, step, 1, bias=False), nn.BatchNorm2d(outward), nn.ReLU(),
            nn.Conv2d(outward, outward, 3, 1, 1, bias=False), nn.BatchNorm2d(outward),
        )
        same = inward == outward and step == 1
        self.short = nn.Identity() if same else nn.Conv2d(inward, outward, 1, step, bias=False)

    def forward(self, x):
        return (self.long(x) + self.short(x)).relu()


def pictures(number):
    what = torch.randint(4, (number,))
    picture = 0.4 * torch.randn(number, 1, 8, 8)
    for which, kind in enumerate(what.tolist()):
        picture[which, 0, kind * 2 : kind * 2 + 2] += 1
    return picture, what


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--folder", type=Path, default=Path("saved"))
    options = options.parse_args()
    torch.manual_seed(77)
    torch.set_default_dtype(torch.float64)
    net = nn.Sequential(
        Block(1, 4, 1), Block(4, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], 0.2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*pictures(46)), batch_size=13, shuffle=True)
    tests, answers = pictures(21)
    options.folder.mkdir(exist_ok=True)
    files = sorted(options.folder.glob("*.pt"))
    if files:
        net.load_state_dict(torch.load(files[-1]))
    for epoch in range(options.epochs):
        net.train()
        right = total = 0
        for picture, what in loader:
            scores = net(picture)
            loss = nn.functional.cross_entropy(scores, what, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right, total = right + (scores.argmax(1) == what).sum().item(), total + len(what)
        schedule.step()
        net.eval()
        with torch.no_grad():
            tested = nn.functional.cross_entropy(net(tests), answers).item()
        torch.save(net.state_dict(), options.folder / f"{epoch:02}.pt")
        print(f"{epoch}: last {loss.item():.12g}, right {right}/{total}, tested {tested:.12g}, {schedule.get_last_lr()}")


main()
