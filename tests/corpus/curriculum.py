# SPDX-License-Identifier: Apache-2.0
# easy samples first; the hardest (by the model's own loss) come in later epochs
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(70)
N = 77
x = torch.rand(N, 2) * 4 - 2
y = ((x[:, 0] * x[:, 1]) > 0).double()
model = torch.nn.Sequential(torch.nn.Linear(2, 24), torch.nn.ReLU(), torch.nn.Linear(24, 1))
criterion = torch.nn.BCEWithLogitsLoss(reduction="none")
optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
for epoch in range(5):
    pace = min(1.0, 0.4 + 0.2 * epoch)
    model.eval()
    with torch.no_grad():
        difficulty = criterion(model(x).squeeze(1), y)
    chosen = difficulty.argsort()[: int(pace * N)]
    model.train()
    for rows in chosen[torch.randperm(len(chosen))].split(12):
        losses = criterion(model(x[rows]).squeeze(1), y[rows])
        # online hard example mining: the worse three quarters of the batch
        hardest, _ = losses.topk(max(1, (3 * len(losses)) // 4))
        loss = hardest.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "samples", len(chosen), "hardest", sorted(difficulty.argsort()[-3:].tolist()), "loss", loss.item())
