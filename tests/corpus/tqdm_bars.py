# SPDX-License-Identifier: Apache-2.0
"""Bars of tqdm around both loops, which are renamed and get notes while they run; lines are printed above them."""

import torch
from sklearn.datasets import load_iris
from torch import nn
from tqdm import tqdm, trange

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
leaves, kinds = (torch.tensor(part) for part in load_iris(return_X_y=True))
leaves = (leaves - leaves.mean(0)) / leaves.std(0)
loader = torch.utils.data.DataLoader(list(zip(leaves, kinds)), batch_size=34, shuffle=True)
net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
rounds = trange(3, unit="round")
for number in rounds:
    right, losses = 0, []
    with tqdm(total=len(kinds), leave=False) as bar:
        for leaf, kind in loader:
            scores = net(leaf)
            loss = nn.functional.cross_entropy(scores, kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += int((scores.argmax(1) == kind).sum())
            bar.set_description(f"{right} right")
            bar.update(len(kind))
    rounds.set_postfix(best=min(losses))
    tqdm.write(f"round {number} from {losses[0]!r} to {losses[-1]!r}, {right} right")
