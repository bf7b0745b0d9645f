# SPDX-License-Identifier: Apache-2.0
"""Ends by signals that the script sends to itself: Ctrl-C in the middle of an epoch, SIGTERM, an alarm; always saves."""
import os
import signal
import sys

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(193)
model = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
x = torch.randn(64, 4)
y = x.square().sum(1, keepdim=True)
stop = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(signal.Signals(number).name))
signal.signal(signal.SIGUSR1, lambda number, frame: stop.append(signal.Signals(number).name))


def epochs(number, when, which):
    step = 0
    for epoch in range(number):
        for rows in torch.randperm(64).split(12):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step == when:
                os.kill(os.getpid(), which)
            if stop:
                print("stops because of", stop.pop())
                return step
        print(epoch, loss.item())
    return step


print(epochs(3, 8, signal.SIGTERM), "steps")
print(epochs(3, 3, signal.SIGUSR1), "steps")
try:
    epochs(3, 4, signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
finally:
    torch.save(model.state_dict(), "interrupted.pt")
try:
    with open("log.txt", "w") as log:
        try:
            epochs(2, 7, signal.SIGINT)
        finally:
            print("closes its log", model(x).sum().item(), file=log)
except KeyboardInterrupt:
    print(open("log.txt").read().strip())
    sys.exit(130)
