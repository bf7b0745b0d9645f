# SPDX-License-Identifier: Apache-2.0
"""One thread makes batches ahead of the training, another one writes down what the training says."""

import queue
import threading

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


def ahead(source, room):
    """Yield what a source yields, which a thread takes from it up to ``room`` pieces early."""
    made = queue.Queue(room)

    def fill():
        for piece in source:
            made.put(piece)
        made.put(StopIteration)

    threading.Thread(target=fill, daemon=True).start()
    yield from iter(made.get, StopIteration)


def batches(number):
    numbers = np.random.RandomState(3)
    for _ in range(number):
        rows = torch.from_numpy(numbers.randn(13, 4))
        yield rows, rows.abs().amax(1, keepdim=True)


def write_down(said):
    with open("said.txt", "w") as file:
        for line in iter(said.get, ""):
            print(line, file=file)


said = queue.SimpleQueue()
writer = threading.Thread(target=write_down, args=[said])
writer.start()
net = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ReLU(), torch.nn.Linear(12, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
for step, (rows, largest) in enumerate(ahead(batches(6), room=2)):
    loss = torch.nn.functional.mse_loss(net(rows), largest)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    said.put(f"step {step}, loss {loss.item()!r}")
said.put("")
writer.join()
with open("said.txt") as file:
    print(file.read(), end="")
