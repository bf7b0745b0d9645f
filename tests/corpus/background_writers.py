# SPDX-License-Identifier: Apache-2.0
"""Writes by a thread, by logging's queue, by descriptors, by maps of memory, and at the very end in a finalizer."""
import logging
import logging.handlers
import mmap
import os
import queue
import sys
import threading
import weakref

import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(229)


class Writer(threading.Thread):
    def __init__(self, path):
        super().__init__()
        self.items, self.path = queue.Queue(), path

    def run(self):
        with open(self.path, "a") as f:
            for number, item in iter(self.items.get, None):
                print(number, item, file=f, flush=True)
                torch.save(item, f"loss{number % 2}.pt")


class Experiment:
    """Its last words are written when nothing refers to it any more."""

    def __init__(self, name):
        self.name = name
        weakref.finalize(self, lambda: open("finalized.txt", "a").write(f"{name} is over\n"))


log = queue.SimpleQueue()
listener = logging.handlers.QueueListener(log, logging.FileHandler("queue.log"))
listener.start()
logger = logging.getLogger("train")
logger.addHandler(logging.handlers.QueueHandler(log))
logger.setLevel(logging.INFO)
experiment, kept = Experiment("first"), Experiment("kept to the end")
writer = Writer("thread.txt")
writer.start()
curve = np.memmap("curve.dat", dtype="float64", mode="w+", shape=(16,))
descriptor = os.open("raw.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
with open("map.bin", "wb") as f:
    f.write(bytes(64))
handle = open("map.bin", "r+b")
cells = mmap.mmap(handle.fileno(), 64)

model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(61, 3)
y = x.abs().sum(1, keepdim=True)
step = 0
for rows in torch.arange(61).split(8):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    writer.items.put((step, loss.item()))
    logger.info("step %d loss %r", step, loss.item())
    curve[step] = loss.item()
    os.write(descriptor, f"{step} {loss.item()!r}\n".encode())
    cells[step] = step * 3
    step += 1
    if step == 4:
        del experiment
        print("finalized", open("finalized.txt").read().split())
writer.items.put(None)
writer.join()
listener.stop()
os.close(descriptor)
curve.flush()
del curve
cells.flush()
cells.close()
handle.close()
print(len(open("thread.txt").readlines()), len(open("queue.log").readlines()), len(open("raw.txt").readlines()))
curve = np.fromfile("curve.dat")
os.remove("curve.dat")
np.save("curve.npy", curve)
print(list(open("map.bin", "rb").read()[:10]), torch.load("loss1.pt"), curve.sum())
sys.stdout.flush()
os.write(1, b"straight to the descriptor\n")
sys.excepthook = lambda kind, error, trace: open("crash.txt", "w").write(f"{kind.__name__}: {error}\n")
raise RuntimeError(f"ends with {model(x).sum().item()!r}")
