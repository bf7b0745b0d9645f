# SPDX-License-Identifier: Apache-2.0
from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Houses(Dataset):
    def __init__(self, n):
        self.x = torch.randn(n, 6)
        self.price = self.x[:, :3].sum(1) + 0.1 * torch.randn(n)
        self.kind = (self.x[:, 3] > 0).long() + (self.x[:, 4] > 0.5).long()

    def __len__(self):
        return self.x.shape[0]

    def __getitem__(self, idx):
        return {"x": self.x[idx], "price": self.price[idx], "kind": self.kind[idx]}


class MultiTaskModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.15))
        self.heads = nn.ModuleDict({"price": nn.Linear(24, 1), "kind": nn.Linear(24, 3)})
        # Kendall et al.: the weights of the tasks are learned
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(31)
    loader, val_loader = DataLoader(Houses(64), 15, shuffle=True), DataLoader(Houses(22), 15)
    model = MultiTaskModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        model.train()
        sums = defaultdict(float)
        for batch in loader:
            out = model(batch["x"])
            l1 = nn.functional.mse_loss(out["price"].squeeze(1), batch["price"])
            l2 = nn.functional.cross_entropy(out["kind"], batch["kind"])
            precision = torch.exp(-model.log_vars)
            loss = (precision * torch.stack([l1, l2]) + model.log_vars).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums["price"] += l1.item() * len(batch["x"])
            sums["kind"] += l2.item() * len(batch["x"])
        model.eval()
        hits = 0
        with torch.no_grad():
            for batch in val_loader:
                hits += (model(batch["x"])["kind"].argmax(1) == batch["kind"]).sum().item()
        print(epoch, {k: v / len(loader.dataset) for k, v in sums.items()}, "val kind:", hits / len(val_loader.dataset),
              "weights:", [round(v, 9) for v in model.log_vars.exp().tolist()])


if __name__ == "__main__":
    main()
