# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.sampler import SubsetRandomSampler

torch.set_default_tensor_type(torch.DoubleTensor)
batch_size, validation_split, shuffle_dataset, random_seed = 32, 0.2, True, 42
torch.manual_seed(random_seed)
bc = load_breast_cancer()
X = (bc.data - bc.data.mean(0)) / bc.data.std(0)
dataset = TensorDataset(torch.from_numpy(X[:250]), torch.from_numpy(bc.target[:250]).double())
dataset_size = len(dataset)
indices = list(range(dataset_size))
split = int(np.floor(validation_split * dataset_size))
if shuffle_dataset:
    np.random.seed(random_seed)
    np.random.shuffle(indices)
train_indices, val_indices = indices[split:], indices[:split]
train_loader = DataLoader(dataset, batch_size=batch_size, sampler=SubsetRandomSampler(train_indices))
validation_loader = DataLoader(dataset, batch_size=batch_size, sampler=SubsetRandomSampler(val_indices))

model = nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1), nn.Sigmoid())
criterion = nn.BCELoss()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    model.train()
    for batch_index, (x, t) in enumerate(train_loader):
        opt.zero_grad()
        loss = criterion(model(x).squeeze(), t)
        loss.backward()
        opt.step()
    model.eval()
    correct, vloss = 0, 0.0
    with torch.no_grad():
        for x, t in validation_loader:
            p = model(x).squeeze(1)
            vloss += criterion(p, t).item() * len(t)
            correct += ((p > 0.5) == t.bool()).sum().item()
    print("epoch", epoch, "train", loss.item(), "val", vloss / len(val_indices), "acc", correct / len(val_indices))
