# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.b(torch.sin(self.a(x)))


def main():
    torch.manual_seed(15)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 12), Block(12), Block(12), nn.Linear(12, 1))
    compiled_model = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(44, 3)
    y = x.pow(3).sum(1, keepdim=True)
    for epoch in range(3):
        for xb, yb in zip(x.split(15), y.split(15)):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.mse_loss(compiled_model(xb), yb)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} {loss.item():.12g}")
    torch.save(compiled_model.state_dict(), "compiled.pt")
    model.eval()
    with torch.no_grad():
        print(compiled_model(x).sum().item())


if __name__ == "__main__":
    main()
