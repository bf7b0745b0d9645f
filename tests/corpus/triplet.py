# SPDX-License-Identifier: Apache-2.0
"""A point must lie nearer to one of its kind than to one of another kind, both drawn by numpy when it is read."""

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
np.random.seed(11)
torch.manual_seed(11)
kinds = np.arange(60) % 5
points = 2 * np.random.randn(5, 6)[kinds] + np.random.randn(60, 6)


class WithCompany(torch.utils.data.Dataset):
    """Each point, with a friend and a stranger."""

    def __len__(self):
        return len(points)

    def __getitem__(self, number):
        alike = kinds == kinds[number]
        friend, stranger = (np.random.choice(np.nonzero(choice)[0]) for choice in (alike, ~alike))
        return points[number], points[friend], points[stranger]


class Map(nn.Module):
    """Finds a place on a circle for each of the points that it is given."""

    def __init__(self):
        super().__init__()
        self.place = nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.Linear(16, 16), nn.PReLU(), nn.Linear(16, 2))

    def forward(self, *points):
        return tuple(nn.functional.normalize(self.place(one), dim=1) for one in points)


flat = Map()
too_near = nn.TripletMarginLoss(margin=0.5)
optimizer = torch.optim.SGD(flat.parameters(), lr=0.05, momentum=0.5)
rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
for epoch in range(3):
    losses = []
    for company in torch.utils.data.DataLoader(WithCompany(), batch_size=7, shuffle=True):
        loss = too_near(*flat(*company))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rates.step()
    print("epoch", epoch, "mean", np.mean(losses), "worst", max(losses), "next rate", optimizer.param_groups[0]["lr"])
with torch.no_grad():
    (places,) = flat(torch.from_numpy(points))
apart = (places[:, None] - places).norm(dim=2) + 9 * torch.eye(60)
print("next to a friend", int((kinds[apart.argmin(1).numpy()] == kinds).sum()))
np.savetxt("places.txt", places.numpy())
