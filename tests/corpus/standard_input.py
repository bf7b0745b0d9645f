# SPDX-License-Identifier: Apache-2.0
"""Asks how to train, as lines of standard input; where nobody answers, it takes what is in brackets."""
import sys

import torch


def ask(question, default):
    print(f"{question} [{default}]: ", end="", flush=True)
    try:
        answer = input()
    except EOFError:
        answer = ""
    print(answer or "(no answer)")
    return type(default)(answer or default)


torch.set_default_dtype(torch.float64)
epochs = ask("epochs", 2)
rate = ask("learning rate", 0.1)
torch.manual_seed(ask("seed", 163))
rest = [float(number) for number in sys.stdin.read().split()]
print(len(rest), "numbers follow; a terminal:", sys.stdin.isatty())
x = torch.tensor(rest)[:, None] if rest else torch.linspace(-1, 1, 27)[:, None]
y = x.pow(3)
model = torch.nn.Sequential(torch.nn.Linear(1, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
opt = torch.optim.SGD(model.parameters(), lr=rate)
for epoch in range(epochs):
    for xb, yb in zip(x.split(8), y.split(8)):
        loss = torch.nn.functional.mse_loss(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
