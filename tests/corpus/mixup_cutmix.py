# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def mixup_data(x, y, alpha=1.0):
    """Returns mixed inputs, pairs of targets, and lambda"""
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size()[0])
    mixed_x = lam * x + (1 - lam) * x[index, :]
    return mixed_x, y, y[index], lam


def rand_bbox(size, lam):
    W, H = size[2], size[3]
    cut_rat = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(W * cut_rat), int(H * cut_rat)
    cx, cy = np.random.randint(W), np.random.randint(H)
    return (
        np.clip(cx - cut_w // 2, 0, W), np.clip(cy - cut_h // 2, 0, H),
        np.clip(cx + cut_w // 2, 0, W), np.clip(cy + cut_h // 2, 0, H),
    )


def cutmix_data(x, y, beta=1.0):
    lam = np.random.beta(beta, beta)
    index = torch.randperm(x.size(0))
    x1, y1, x2, y2 = rand_bbox(x.size(), lam)
    x = x.clone()
    x[:, :, x1:x2, y1:y2] = x[index, :, x1:x2, y1:y2]
    lam = 1 - ((x2 - x1) * (y2 - y1) / (x.size(-1) * x.size(-2)))
    return x, y, y[index], lam


def main():
    torch.set_default_dtype(torch.float64)
    np.random.seed(16)
    torch.manual_seed(16)
    digits = load_digits()
    ds = TensorDataset(torch.tensor(digits.images[:90]).unsqueeze(1) / 16, torch.tensor(digits.target[:90]))
    loader = DataLoader(ds, batch_size=16, shuffle=True)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for epoch in range(2):
        net.train()
        train_loss = correct = total = 0
        for inputs, targets in loader:
            if np.random.rand() < 0.5:
                inputs, a, b, lam = mixup_data(inputs, targets, 0.4)
            else:
                inputs, a, b, lam = cutmix_data(inputs, targets)
            outputs = net(inputs)
            loss = lam * criterion(outputs, a) + (1 - lam) * criterion(outputs, b)
            train_loss += loss.item()
            predicted = outputs.argmax(1)
            total += targets.size(0)
            correct += lam * predicted.eq(a).sum().item() + (1 - lam) * predicted.eq(b).sum().item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            clean = F.cross_entropy(net(ds.tensors[0]), ds.tensors[1]).item()
        print("Epoch %d | Loss %.12f | Acc %.6f (%.6f/%d) | clean %.12f" % (
            epoch, train_loss / len(loader), 100.0 * correct / total, correct, total, clean))


if __name__ == "__main__":
    main()
