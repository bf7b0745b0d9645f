# SPDX-License-Identifier: Apache-2.0
"""Logistic regression with plain tensors and no module at all, then the same with nn.Linear."""
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
N = 45
X = torch.randn(N, 3)
true_w = torch.tensor([1.5, -2.0, 0.3])
y = (torch.sigmoid(X @ true_w) > torch.rand(N)).double()

w = torch.zeros(3, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
for epoch in range(20):
    p = torch.sigmoid(X @ w + b)
    loss = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    loss.backward()
    with torch.no_grad():
        w -= 0.5 * w.grad
        b -= 0.5 * b.grad
        w.grad.zero_()
        b.grad = None
    if epoch % 5 == 4:
        print(epoch + 1, loss.item(), w.tolist())

linear = torch.nn.Linear(3, 1)
with torch.no_grad():
    linear.weight.zero_()
    linear.bias.zero_()
for epoch in range(20):
    loss = torch.nn.functional.binary_cross_entropy_with_logits(linear(X).squeeze(1), y)
    linear.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in linear.parameters():
            p.sub_(0.5 * p.grad)
print("difference", (linear.weight[0] - w).abs().max().item() < 1e-12, loss.item())
