# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float64)
np.random.seed(11)
torch.manual_seed(11)

centres = np.random.randn(5, 6) * 2
X = np.concatenate([c + np.random.randn(12, 6) for c in centres])
Y = np.repeat(np.arange(5), 12)


class TripletDataset(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        pos = np.random.choice(np.flatnonzero(Y == Y[i]))
        neg = np.random.choice(np.flatnonzero(Y != Y[i]))
        return X[i], X[pos], X[neg]


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.Linear(16, 16), nn.PReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return nn.functional.normalize(self.fc(x), dim=1)

    def get_embedding(self, x):
        return self.forward(x)


class TripletNet(nn.Module):
    def __init__(self, embedding_net):
        super().__init__()
        self.embedding_net = embedding_net

    def forward(self, x1, x2, x3):
        return self.embedding_net(x1), self.embedding_net(x2), self.embedding_net(x3)

    def get_embedding(self, x):
        return self.embedding_net(x)


model = TripletNet(EmbeddingNet())
loss_fn = nn.TripletMarginLoss(margin=0.5, p=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
loader = torch.utils.data.DataLoader(TripletDataset(), batch_size=7, shuffle=True)
for epoch in range(3):
    losses, nonzero = [], 0
    for a, p, n in loader:
        out = model(a, p, n)
        loss = loss_fn(*out)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        nonzero += int(loss.item() > 0)
    scheduler.step()
    print(f"Epoch: {epoch + 1}/3. Train set: Average loss: {np.mean(losses):.12g}. Active batches: {nonzero}, lr {scheduler.get_last_lr()}")

with torch.no_grad():
    e = model.get_embedding(torch.from_numpy(X)).numpy()
d = ((e[:, None] - e[None]) ** 2).sum(-1)
np.fill_diagonal(d, np.inf)
print("1-NN accuracy", (Y[d.argmin(1)] == Y).mean())
np.savetxt("embeddings.txt", e)
