# SPDX-License-Identifier: Apache-2.0
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
n, d_in, h, d_out, batch = 71, 7, 19, 2, 16
x = torch.randn(n, d_in)
y = torch.stack([x[:, 0].sin(), x[:, 1:3].prod(1)], 1)
model = torch.nn.Sequential(torch.nn.Linear(d_in, h), torch.nn.ReLU(), torch.nn.Linear(h, d_out))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(4):
    permutation = torch.randperm(x.size()[0])
    epoch_loss = 0
    for i in range(0, x.size()[0], batch):
        optimizer.zero_grad()
        indices = permutation[i : i + batch]
        batch_x, batch_y = x[indices], y[indices]
        outputs = model.forward(batch_x)
        loss = torch.nn.functional.mse_loss(outputs, batch_y)
        loss.backward()
        optimizer.step()
        epoch_loss += outputs.shape[0] * loss.item()
    print(epoch, epoch_loss / n)
