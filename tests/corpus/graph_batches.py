# SPDX-License-Identifier: Apache-2.0
"""Batches of small graphs, padded to the largest one: adjacency [batch, nodes, nodes], mask [batch, nodes]."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(6)


def random_graph():
    n = int(torch.randint(3, 7, ()))
    a = torch.triu((torch.rand(n, n) < 0.5).double(), 1)
    a = a + a.T
    triangles = torch.trace(a @ a @ a) / 6
    return a, triangles


def collate(graphs):
    width = max(a.shape[0] for a, _ in graphs)
    adj = torch.zeros(len(graphs), width, width)
    mask = torch.zeros(len(graphs), width)
    for i, (a, _) in enumerate(graphs):
        n = a.shape[0]
        adj[i, :n, :n] = a
        mask[i, :n] = 1
    return adj, mask, torch.stack([t for _, t in graphs])


class GNN(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.first = nn.Linear(1, d)
        self.msg = nn.ModuleList([nn.Linear(d, d) for _ in range(2)])
        self.upd = nn.GRUCell(d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, adj, mask):
        h = self.first(adj.sum(-1, keepdim=True))
        for m in self.msg:
            incoming = adj @ torch.relu(m(h))
            h = self.upd(incoming.flatten(0, 1), h.flatten(0, 1)).view_as(h)
        h = h * mask[..., None]
        return self.out(h.sum(1)).squeeze(1)


graphs = [random_graph() for _ in range(50)]
loader = torch.utils.data.DataLoader(graphs, batch_size=9, shuffle=True, collate_fn=collate)
net = GNN()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(2):
    total = 0.0
    for adj, mask, y in loader:
        loss = nn.functional.mse_loss(net(adj, mask), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * y.numel()
    print("epoch %d: mse %.12g" % (epoch, total / len(graphs)))
