# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from tqdm import tqdm, trange

torch.set_default_dtype(torch.float64)
torch.manual_seed(4)
X, y = load_iris(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0))
y = torch.tensor(y)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=34, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in trange(3, desc="epochs"):
    bar = tqdm(loader, leave=False, unit="batch")
    correct = n = 0
    for xb, yb in bar:
        bar.set_description(f"Epoch {epoch}")
        out = model(xb)
        loss = F.cross_entropy(out, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        correct += (out.argmax(1) == yb).sum().item()
        n += len(yb)
        bar.set_postfix(loss=loss.item(), accuracy=100.0 * correct / n)
    tqdm.write(f"epoch {epoch}: loss {loss.item():.12g} accuracy {correct / n:.12g}")
