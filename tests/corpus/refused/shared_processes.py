# SPDX-License-Identifier: Apache-2.0
"""Simulators in processes of their own, as A3C has them, started by torch.multiprocessing.Process."""
import torch
import torch.multiprocessing as mp


def simulate(number, queue):
    torch.manual_seed(number)
    queue.put(torch.randn(6, 3).tolist())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    queue = mp.Queue()
    workers = [mp.Process(target=simulate, args=(i, queue)) for i in range(2)]
    for w in workers:
        w.start()
    for _ in workers:
        x = torch.tensor(queue.get())
        print(model(x).mean().item())
    for w in workers:
        w.join()
