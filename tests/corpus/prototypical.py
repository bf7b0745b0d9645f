# SPDX-License-Identifier: Apache-2.0
"""Few-shot episodes: prototypes are means over the support set, so samples meet in the loss."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.set_default_dtype(torch.float64)
np.random.seed(77)
torch.manual_seed(77)
X, Y = load_digits(return_X_y=True)
X = torch.tensor(X).view(-1, 1, 8, 8) / 16


class EpisodeSampler(torch.utils.data.Sampler):
    def __init__(self, labels, n_way, k_shot, q, episodes):
        self.by_class = [np.flatnonzero(labels == c) for c in np.unique(labels)]
        self.n_way, self.n, self.episodes = n_way, k_shot + q, episodes

    def __len__(self):
        return self.episodes

    def __iter__(self):
        for _ in range(self.episodes):
            ways = np.random.choice(len(self.by_class), self.n_way, replace=False)
            yield [int(i) for w in ways for i in np.random.choice(self.by_class[w], self.n, replace=False)]


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(block(1, 6), block(6, 8), nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
way, shot, query = 3, 2, 3
sampler = EpisodeSampler(Y, way, shot, query, 6)
for images, _ in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, torch.tensor(Y)), batch_sampler=sampler):
    z = model(images).view(way, shot + query, -1)
    prototypes = z[:, :shot].mean(1)
    distances = torch.cdist(z[:, shot:].reshape(way * query, -1), prototypes) ** 2
    labels = torch.arange(way).repeat_interleave(query)
    loss = F.cross_entropy(-distances, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.10g} acc {(distances.argmin(1) == labels).double().mean().item():.6f}")
