# SPDX-License-Identifier: Apache-2.0
"""Threads: one evaluates a copy while the training runs, four predict at once, one trains the model itself."""
import copy
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(167)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
x = torch.randn(68, 4)
y = (x.prod(1) > 0).long()
jobs, scores = queue.Queue(), []


def evaluate():
    torch.set_default_dtype(torch.float64)
    while True:
        job = jobs.get()
        if job is None:
            return
        step, net = job
        with torch.no_grad():
            scores.append((step, nn.functional.cross_entropy(net(x), y).item()))


def train(steps, out):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(steps):
        rows = torch.arange(step * 5, step * 5 + 21) % 68
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
        if step % 4 == 1:
            jobs.put((step, copy.deepcopy(model).eval()))


worker = threading.Thread(target=evaluate)
worker.start()
losses = []
train(12, losses)
jobs.put(None)
worker.join()
print(losses)
print(scores)

model.eval()


def predict(part):
    with torch.inference_mode():
        return model(part).argmax(1).sum().item(), model(part).sum().item()


with ThreadPoolExecutor(4) as pool:
    print(list(pool.map(predict, x.split(15))))
more = []
trainer = threading.Thread(target=train, args=(6, more))
trainer.start()
trainer.join()
print(more, trainer.is_alive())
failed = []


def fail():
    try:
        model(x[:, :2])
    except RuntimeError as error:
        failed.append(type(error).__name__)


bad = threading.Thread(target=fail)
bad.start()
bad.join()
print(failed, model(x).sum().item())
