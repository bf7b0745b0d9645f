# SPDX-License-Identifier: Apache-2.0
"""Every iris is told by a net that has not learnt from it; one net serves all folds, with its layers reset."""
import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)


class Botanist(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3), nn.Identity())

    def forget(self):
        for layer in self:
            if list(layer.parameters()):
                layer.reset_parameters()

    def learn(self, flowers, which):
        optimizer = torch.optim.Adam(self.parameters(), lr=2e-2)
        loader = DataLoader(flowers, 20, sampler=SubsetRandomSampler(which))
        self.train()
        for epoch in range(2):
            losses = []
            for sizes, kinds in loader:
                loss = nn.functional.cross_entropy(self(sizes), kinds)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            print("  epoch", epoch, "losses", *[f"{loss:.12g}" for loss in losses])

    def tell(self, flowers, which):
        self.eval()
        for sizes, kinds in DataLoader(Subset(flowers, which), 17):
            yield from (self(sizes).argmax(1) == kinds).tolist()


def main():
    sizes, kinds = load_iris(return_X_y=True)
    flowers = TensorDataset(torch.from_numpy(sizes), torch.from_numpy(kinds))
    botanist = Botanist()
    shares = []
    for fold, (learn, tell) in enumerate(StratifiedKFold(4, shuffle=True, random_state=1).split(sizes, kinds)):
        print("fold", fold, "learns", len(learn), "tells", len(tell))
        botanist.forget()
        botanist.learn(flowers, learn.tolist())
        torch.save(botanist.state_dict(), f"botanist{fold}.pt")
        right = list(botanist.tell(flowers, tell))
        shares.append(sum(right) / len(right))
        print("  right", sum(right))
    shares = torch.tensor(shares)
    print("share that is right:", shares.mean().item(), "give or take", shares.std().item())


if __name__ == "__main__":
    main()
