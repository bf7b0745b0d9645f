# SPDX-License-Identifier: Apache-2.0
"""Batches of small graphs as one large graph without edges between them; a vector says which graph a node is in."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Data:
    def __init__(self, x, edge_index, y):
        self.x, self.edge_index, self.y = x, edge_index, y


class Batch:
    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y
        self.num_graphs = len(y)

    @staticmethod
    def from_data_list(items):
        xs, edges, which, offset = [], [], [], 0
        for k, d in enumerate(items):
            xs.append(d.x)
            edges.append(d.edge_index + offset)
            which.append(torch.full((len(d.x),), k))
            offset += len(d.x)
        return Batch(torch.cat(xs), torch.cat(edges, 1), torch.cat(which), torch.tensor([d.y for d in items]))


class GINConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.Linear(i, o), nn.ReLU(), nn.Linear(o, o))

    def forward(self, x, edge_index):
        src, dst = edge_index
        agg = torch.zeros_like(x).index_add(0, dst, x[src])
        return self.mlp((1 + self.eps) * x + agg)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GINConv(3, 8), GINConv(8, 8)
        self.lin = nn.Linear(8, 2)

    def forward(self, x, edge_index, batch):
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        n = int(batch.max()) + 1
        pooled = torch.zeros(n, x.size(1)).index_add(0, batch, x)
        return self.lin(F.dropout(pooled, 0.2, self.training))


def build(i):
    n = 3 + i % 4
    ring = torch.tensor([[k, (k + 1) % n] for k in range(n)]).T
    edge = torch.cat([ring, ring.flip(0)], 1) if i % 2 else ring
    return Data(torch.randn(n, 3), edge, i % 2)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(12)
    dataset = [build(i) for i in range(37)]
    loader = torch.utils.data.DataLoader(dataset[:30], batch_size=8, shuffle=True, collate_fn=Batch.from_data_list)
    test = Batch.from_data_list(dataset[30:])
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(1, 4):
        model.train()
        loss_all = 0
        for data in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)
            loss.backward()
            loss_all += data.num_graphs * loss.item()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = (model(test.x, test.edge_index, test.batch).argmax(1) == test.y).sum().item()
        print(f"Epoch: {epoch:03d}, Train Loss: {loss_all / 30:.12f}, Test Acc: {correct / 7:.6f}")
