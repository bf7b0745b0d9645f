# SPDX-License-Identifier: Apache-2.0
"""Kipf & Welling's GCN on Zachary's karate club: the whole graph in each step."""
import torch
import torch.nn as nn
import torch.nn.functional as F

EDGES = """0-1 0-2 0-3 0-4 0-5 0-6 0-7 0-8 0-10 0-11 0-12 0-13 0-17 0-19 0-21 0-31 1-2 1-3 1-7 1-13 1-17 1-19 1-21 1-30
2-3 2-7 2-8 2-9 2-13 2-27 2-28 2-32 3-7 3-12 3-13 4-6 4-10 5-6 5-10 5-16 6-16 8-30 8-32 8-33 9-33 13-33 14-32 14-33 15-32
15-33 18-32 18-33 19-33 20-32 20-33 22-32 22-33 23-25 23-27 23-29 23-32 23-33 24-25 24-27 24-31 25-31 26-29 26-33 27-33
28-31 28-33 29-32 29-33 30-32 30-33 31-32 31-33 32-33"""


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        output = torch.spmm(adj, support)
        return output + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def load_data():
    adj = torch.eye(34)
    for e in EDGES.split():
        i, j = map(int, e.split("-"))
        adj[i, j] = adj[j, i] = 1
    d = adj.sum(1).rsqrt()
    adj = (d[:, None] * adj * d[None, :]).to_sparse()
    second = {8, 9, 14, 15, 18, 20, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33}
    labels = torch.tensor([int(i in second) for i in range(34)])
    return adj, torch.eye(34), labels, torch.tensor([0, 33, 5, 26]), torch.tensor([i for i in range(34) if i not in (0, 33, 5, 26)])


torch.set_default_dtype(torch.float64)
torch.manual_seed(42)
adj, features, labels, idx_train, idx_test = load_data()
model = GCN(34, 8, 2, 0.4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
for epoch in range(12):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    if epoch % 4 == 3:
        model.eval()
        output = model(features, adj)
        acc = (output[idx_test].argmax(1) == labels[idx_test]).double().mean()
        print(f"Epoch: {epoch + 1:04d} loss_train: {loss_train.item():.12g} acc_test: {acc.item():.6f}")
