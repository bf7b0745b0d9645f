# SPDX-License-Identifier: Apache-2.0
import torch
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    """Pairs of a sliding window and the next value, as they arrive."""

    def __init__(self, length, window):
        self.length, self.window = length, window

    def __iter__(self):
        buffer = []
        value = 0.5
        for _ in range(self.length):
            value = 3.7 * value * (1 - value)
            buffer.append(value)
            if len(buffer) > self.window:
                yield torch.tensor(buffer[-self.window - 1 : -1], dtype=torch.double), torch.tensor([buffer[-1]]).double()


torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
loader = DataLoader(Stream(60, 4), batch_size=8)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
seen = 0
for epoch in range(3):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seen += len(x)
    print(f"epoch={epoch} batches={len(losses)} seen={seen} loss={sum(losses) / len(losses):.12g}")
