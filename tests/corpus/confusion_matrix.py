# SPDX-License-Identifier: Apache-2.0
"""Class weights, focal loss, confusion matrix and report in evaluation."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from sklearn.metrics import classification_report, confusion_matrix, f1_score


class FocalLoss(nn.Module):
    def __init__(self, alpha=None, gamma=2.0, reduction="mean"):
        super().__init__()
        self.register_buffer("alpha", alpha)
        self.gamma = gamma
        self.reduction = reduction

    def forward(self, inputs, targets):
        ce_loss = F.cross_entropy(inputs, targets, weight=self.alpha, reduction="none")
        pt = torch.exp(-ce_loss)
        loss = (1 - pt) ** self.gamma * ce_loss
        return loss.mean() if self.reduction == "mean" else loss.sum()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    X, y = make_classification(
        n_samples=140, n_features=8, n_informative=6, n_redundant=0, n_classes=3, weights=[0.7, 0.2, 0.1], random_state=5
    )
    X, y = torch.from_numpy(X), torch.from_numpy(y)
    train, val = slice(0, 100), slice(100, None)
    counts = torch.bincount(y[train]).double()
    criterion = FocalLoss(alpha=counts.sum() / (len(counts) * counts))
    weighted = nn.CrossEntropyLoss(weight=criterion.alpha)
    model = nn.Sequential(nn.Linear(8, 20), nn.Hardswish(), nn.Linear(20, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(4):
        perm = torch.randperm(100)
        for start in range(0, 100, 32):
            rows = perm[start : start + 32]
            opt.zero_grad()
            out = model(X[train][rows])
            loss = criterion(out, y[train][rows]) + 0.1 * weighted(out, y[train][rows])
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            pred = torch.cat([model(c).argmax(1) for c in X[val].split(7)])
        model.train()
        print(f"epoch {epoch} loss {loss.item():.12g} macro F1 {f1_score(y[val], pred, average='macro'):.12g}")
    print(confusion_matrix(y[val].numpy(), pred.numpy()))
    print(classification_report(y[val].numpy(), pred.numpy(), zero_division=0))


main()
