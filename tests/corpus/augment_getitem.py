# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class RandomHorizontalFlip:
    def __call__(self, img):
        return img[..., ::-1].copy() if random.random() < 0.5 else img


class RandomShift:
    def __init__(self, amount):
        self.amount = amount

    def __call__(self, img):
        return np.roll(img, np.random.randint(-self.amount, self.amount + 1), axis=-2)


class ToTensor:
    def __call__(self, img):
        return torch.from_numpy(np.ascontiguousarray(img))


class AddNoise:
    def __call__(self, t):
        return t + 0.1 * torch.randn_like(t)


class Letters(Dataset):
    glyphs = {"T": "111 010 010", "L": "100 100 111", "I": "010 010 010"}

    def __init__(self, n, transform):
        self.items = [random.choice("TLI") for _ in range(n)]
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        g = np.array([[float(c) for c in row] for row in self.glyphs[self.items[i]].split()])
        return self.transform(np.pad(g, 2)[None]), "TLI".index(self.items[i])


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


seed_everything(2024)
torch.set_default_dtype(torch.float64)
tf = Compose([RandomHorizontalFlip(), RandomShift(1), ToTensor(), AddNoise()])
train_loader = DataLoader(Letters(50, tf), batch_size=9, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    correct, total_loss = 0, 0
    for img, label in train_loader:
        out = model(img)
        loss = nn.CrossEntropyLoss()(out, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        correct += (out.argmax(1) == label).sum().item()
    print(f"[{epoch + 1}] loss: {total_loss / len(train_loader):.12g} acc: {correct}/50")
