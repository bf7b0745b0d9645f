# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset


def reset_weights(m):
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))
        self.fc = nn.Identity()

    def forward(self, x):
        return self.fc(self.layers(x))


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    k_folds, num_epochs = 4, 2
    results = {}
    torch.manual_seed(42)
    X, y = load_iris(return_X_y=True)
    dataset = TensorDataset(torch.tensor(X), torch.tensor(y))
    kfold = StratifiedKFold(n_splits=k_folds, shuffle=True, random_state=1)
    print("--------------------------------")
    for fold, (train_ids, test_ids) in enumerate(kfold.split(X, y)):
        print(f"FOLD {fold}")
        trainloader = DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(train_ids))
        testloader = DataLoader(Subset(dataset, test_ids), batch_size=17)
        network = Network()
        network.layers.apply(reset_weights)
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
        for epoch in range(num_epochs):
            network.train()
            current_loss = 0.0
            for i, data in enumerate(trainloader, 0):
                inputs, targets = data
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(inputs), targets)
                loss.backward()
                optimizer.step()
                current_loss += loss.item()
                if i % 3 == 2:
                    print("Loss after mini-batch %5d: %.12f" % (i + 1, current_loss / 3))
                    current_loss = 0.0
        torch.save(network.state_dict(), f"./model-fold-{fold}.pth")
        correct, total = 0, 0
        network.eval()
        with torch.no_grad():
            for inputs, targets in testloader:
                _, predicted = torch.max(network(inputs).data, 1)
                total += targets.size(0)
                correct += (predicted == targets).sum().item()
        results[fold] = 100.0 * (correct / total)
        print("Accuracy for fold %d: %.4f %%" % (fold, results[fold]))
    print(f"Average: {np.mean(list(results.values()))} %, deviation {np.std(list(results.values()))}")
