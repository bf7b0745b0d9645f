# SPDX-License-Identifier: Apache-2.0
"""One data set, two loaders: each draws from its own rows by a SubsetRandomSampler. Doubles by the older call."""

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

torch.set_default_tensor_type(torch.DoubleTensor)
torch.manual_seed(42)
np.random.seed(42)
measured, harmless = load_breast_cancer(return_X_y=True)
patients = TensorDataset(torch.from_numpy(scale(measured[:250])), torch.from_numpy(harmless[:250]).double())
order = np.arange(250)
np.random.shuffle(order)
learnt, held_back = (
    DataLoader(patients, batch_size=32, sampler=SubsetRandomSampler(rows.tolist())) for rows in np.split(order, [200])
)
net = nn.Sequential(nn.Linear(30, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1), nn.Sigmoid())
cost = nn.BCELoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    net.train()
    for rows, wanted in learnt:
        optimizer.zero_grad()
        loss = cost(net(rows)[:, 0], wanted)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        answers = [(net(rows)[:, 0], wanted) for rows, wanted in held_back]
    given, wanted = map(torch.cat, zip(*answers))
    right = int((given.round() == wanted).sum())
    print("epoch", epoch, repr(loss.item()), "held back", repr(cost(given, wanted).item()), "right", right, "of 50")
