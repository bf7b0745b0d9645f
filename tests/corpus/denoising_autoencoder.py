# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Clean digits from noisy ones
# Exported from a notebook.

# %%
import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, random_split

torch.set_default_dtype(torch.float64)
torch.manual_seed(100)

# %%
digits = torch.tensor(load_digits().data[:130]) / 16
known, unknown = random_split(digits, [100, 30])
known = DataLoader(known, 17, shuffle=True)
unknown = DataLoader(unknown, 17)


# %%
def spoilt(digit):
    return torch.normal(digit, 0.3).clamp(0, 1)


class Layers(nn.Module):
    """Two layers with a bend between them."""

    def __init__(self, *sizes):
        super().__init__()
        self.one, self.two = nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])

    def forward(self, x):
        return self.two(nn.functional.relu(self.one(x), inplace=True))


squeeze, unfold = Layers(64, 24, 4), Layers(4, 24, 64)
optimizer = torch.optim.Adam([{"params": part.parameters()} for part in (squeeze, unfold)], lr=5e-3, weight_decay=1e-5)


def cleaned(digit):
    return unfold(squeeze(digit)).sigmoid()


# %%
curves = {"known": [], "unknown": []}
for epoch in range(3):
    squeeze.train(), unfold.train()
    losses = []
    for digit in known:
        loss = nn.functional.mse_loss(cleaned(spoilt(digit)), digit)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy())
    curves["known"].append(np.mean(losses))
    squeeze.eval(), unfold.eval()
    with torch.no_grad():
        squares = [(cleaned(spoilt(digit)) - digit).square() for digit in unknown]
    curves["unknown"].append(torch.cat(squares).mean().item())
    print("epoch", epoch, *(f"{name} {values[-1]:.12f}" for name, values in curves.items()))

# %%
np.savez("curves.npz", **curves)
curves
