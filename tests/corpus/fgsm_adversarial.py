# SPDX-License-Identifier: Apache-2.0
"""Adversarial training (FGSM and PGD): gradients with respect to the inputs."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.set_default_dtype(torch.float64)
torch.manual_seed(33)


def fgsm_attack(image, epsilon, data_grad):
    return torch.clamp(image + epsilon * data_grad.sign(), 0, 1)


def pgd(model, x, y, eps=0.1, alpha=0.04, steps=3):
    delta = torch.empty_like(x).uniform_(-eps, eps).requires_grad_(True)
    for _ in range(steps):
        loss = F.cross_entropy(model(x + delta), y)
        (grad,) = torch.autograd.grad(loss, delta)
        delta.data = (delta + alpha * grad.sign()).clamp(-eps, eps)
    return (x + delta).detach()


X, Y = load_digits(n_class=5, return_X_y=True)
X, Y = torch.tensor(X[:84]) / 16, torch.tensor(Y[:84])
model = nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 5))
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for epoch in range(2):
    for x, y in zip(X[:60].split(13), Y[:60].split(13)):
        adv = pgd(model, x, y)
        opt.zero_grad()
        loss = 0.5 * F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(adv), y)
        loss.backward()
        opt.step()
    print(epoch, loss.item())
for eps in (0.0, 0.1, 0.3):
    correct = 0
    for data, target in zip(X[60:].split(1), Y[60:].split(1)):
        data = data.clone()
        data.requires_grad = True
        output = model(data)
        if output.argmax(1).item() != target.item():
            continue
        loss = F.nll_loss(F.log_softmax(output, 1), target)
        model.zero_grad()
        loss.backward()
        correct += int(model(fgsm_attack(data, eps, data.grad.data)).argmax(1).item() == target.item())
    print(f"Epsilon: {eps}\tTest Accuracy = {correct} / 24 = {correct / 24}")
