# SPDX-License-Identifier: Apache-2.0
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(55)
X, y = load_wine(return_X_y=True)
keep = [i for i in range(len(y)) if y[i] < 2 or i % 5 == 0]
X, y = StandardScaler().fit_transform(X[keep]), torch.tensor(y[keep])
class_sample_count = torch.bincount(y)
weights = (1.0 / class_sample_count.double())[y]
print("counts:", class_sample_count.tolist())
sampler = WeightedRandomSampler(weights, len(weights), replacement=True)
loader = DataLoader(TensorDataset(torch.tensor(X), y), batch_size=21, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(13, 12), torch.nn.ELU(), torch.nn.Linear(12, 3))
optim = torch.optim.RMSprop(model.parameters(), lr=0.002)
for epoch in range(1, 4):
    seen = torch.zeros(3, dtype=torch.long)
    epoch_loss = 0
    for xb, yb in loader:
        seen += torch.bincount(yb, minlength=3)
        loss = torch.nn.functional.cross_entropy(model(xb), yb)
        optim.zero_grad()
        loss.backward()
        optim.step()
        epoch_loss += loss.item()
    print(f"{epoch=} classes={seen.tolist()} loss={epoch_loss / len(loader):.12g}")
