# SPDX-License-Identifier: Apache-2.0
"""Batches are made by a thread ahead of the training, and a second thread writes the log."""
import queue
import threading

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class BackgroundGenerator(threading.Thread):
    def __init__(self, generator, size=2):
        super().__init__(daemon=True)
        self.queue, self.generator = queue.Queue(size), generator
        self.start()

    def run(self):
        for item in self.generator:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        while (item := self.queue.get()) is not None:
            yield item


def batches():
    rng = np.random.RandomState(3)
    for _ in range(6):
        x = torch.from_numpy(rng.randn(13, 4))
        yield x, x.abs().sum(1, keepdim=True)


messages = queue.Queue()


def writer():
    with open("log.txt", "w") as f:
        while (line := messages.get()) is not None:
            f.write(line + "\n")


thread = threading.Thread(target=writer)
thread.start()
model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for i, (x, y) in enumerate(BackgroundGenerator(batches())):
    loss = torch.nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    messages.put(f"{i} {loss.item():.12g}")
messages.put(None)
thread.join()
print(open("log.txt").read().strip())
