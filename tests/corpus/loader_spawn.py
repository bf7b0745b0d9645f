# SPDX-License-Identifier: Apache-2.0
import torch
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    x = torch.randn(30, 3)
    ds = TensorDataset(x, x.sum(1, keepdim=True))
    dl = DataLoader(ds, batch_size=7, shuffle=True, num_workers=1, multiprocessing_context="spawn")
    model = torch.nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for xb, yb in dl:
        loss = ((model(xb) - yb) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(loss.item())
    print(model.weight.tolist(), model.bias.tolist())
