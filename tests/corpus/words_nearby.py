# SPDX-License-Identifier: Apache-2.0
"""Which words stand near which? Two tables with sparse gradients, and words drawn at random that do not."""
import numpy as np
import torch
from torch import nn

rng = np.random.RandomState(9)
torch.manual_seed(9)
torch.set_default_dtype(torch.float64)
tale = ("a fox met a hen and the hen met a fox . the hen ran to the barn and the fox ran to the wood . in the barn a "
        "cow sat and in the wood an owl sat . the cow saw the hen and the owl saw the fox .").split()
words = sorted(set(tale))
number = {word: place for place, word in enumerate(words)}
near = [(number[tale[i]], number[tale[j]]) for i in range(len(tale)) for j in (i - 1, i + 1) if 0 <= j < len(tale)]


class Tables(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.here, self.there = nn.Embedding(len(words), size, sparse=True), nn.Embedding(len(words), size, sparse=True)

    def forward(self, middle, beside, others):
        at = self.here(middle).unsqueeze(1)
        close = nn.functional.softplus(-(at * self.there(beside).unsqueeze(1)).sum(-1)).mean()
        return close + nn.functional.softplus((at * self.there(others)).sum(-1)).mean()


tables = Tables(7)
optimizer = torch.optim.SparseAdam(tables.parameters(), lr=0.03)
for epoch in range(2):
    rng.shuffle(near)
    for start in range(0, len(near), 21):
        middle, beside = torch.tensor(near[start : start + 21]).T
        loss = tables(middle, beside, torch.tensor(rng.randint(len(words), size=(len(middle), 3))))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, repr(loss.item()))
np.save("words.npy", tables.here.weight.detach().numpy())
