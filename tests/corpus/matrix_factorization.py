# SPDX-License-Identifier: Apache-2.0
"""Which books do readers like? Tables of embeddings with dense gradients, then the same with sparse ones."""

import numpy as np
import torch
from torch import nn

READERS, BOOKS = 18, 14


class Taste(nn.Module):
    """The last number of a row tells how kind the reader is, or how good the book."""

    def __init__(self, size, sparse):
        super().__init__()
        self.reader = nn.Embedding(READERS, size + 1, sparse=sparse)
        self.book = nn.Embedding(BOOKS, size + 1, sparse=sparse)
        for table in self.children():
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, who, what):
        reader, book = self.reader(who), self.book(what)
        return reader[:, -1] + book[:, -1] + torch.linalg.vecdot(reader[:, :-1], book[:, :-1])


def opinions():
    numbers = np.random.RandomState(0)
    like = np.tanh(numbers.randn(READERS, 1) + numbers.randn(BOOKS) + 0.3 * numbers.randn(READERS, BOOKS))
    who, what = np.nonzero(numbers.rand(READERS, BOOKS) < 0.4)
    return torch.from_numpy(who), torch.from_numpy(what), torch.from_numpy(like[who, what])


def learn(name, taste, optimizer):
    who, what, like = opinions()
    for epoch in range(3):
        wrong = 0.0
        for rows in torch.randperm(len(like)).split(16):
            error = (taste(who[rows], what[rows]) - like[rows]).square()
            optimizer.zero_grad()
            error.mean().backward()
            optimizer.step()
            wrong += error.sum().item()
        print(name, epoch, repr(wrong / len(like)))
    print(name, taste.book.weight.grad.layout)


torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
dense, sparse = Taste(3, sparse=False), Taste(3, sparse=True)
learn("dense", dense, torch.optim.Adam(dense.parameters(), lr=0.05, weight_decay=1e-5))
learn("sparse", sparse, torch.optim.SparseAdam(list(sparse.parameters()), lr=0.05))
