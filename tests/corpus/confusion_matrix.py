# SPDX-License-Identifier: Apache-2.0
"""Class weights, a loss for rare and hard samples, confusion matrix and report in evaluation."""
import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.metrics import classification_report, confusion_matrix, f1_score


class RareAndHard(nn.Module):
    """Cross entropy to which a sample adds less, the commoner its class is and the surer the model is of it."""

    def __init__(self, counts, power=2.0):
        super().__init__()
        self.register_buffer("worth", counts.sum() / (len(counts) * counts))
        self.power = power

    def forward(self, scores, classes):
        logs = scores.log_softmax(1).gather(1, classes[:, None]).squeeze(1)
        return -(self.worth[classes] * (1 - logs.exp()) ** self.power * logs).mean()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    X, y = make_classification(
        n_samples=140, n_features=8, n_informative=6, n_redundant=0, n_classes=3, weights=[0.7, 0.2, 0.1],
        random_state=5,
    )
    X, y = torch.from_numpy(X), torch.from_numpy(y)
    train, val = slice(0, 100), slice(100, None)
    criterion = RareAndHard(torch.bincount(y[train]).double())
    weighted = nn.CrossEntropyLoss(weight=criterion.worth)
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
