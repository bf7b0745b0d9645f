# SPDX-License-Identifier: Apache-2.0
"""Simulators in processes of their own, as A3C has them, started by torch.multiprocessing.Process; one shares the model."""
import torch
import torch.multiprocessing as mp


def simulate(number, queue):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(number)
    queue.put((number, torch.randn(6, 3).tolist()))


def act(model, observed, actions):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    while True:
        rows = observed.get()
        if rows is None:
            return
        with torch.no_grad():
            actions.put(model(torch.tensor(rows)).tolist())


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    queue = mp.Queue()
    workers = [mp.Process(target=simulate, args=(i, queue)) for i in range(2)]
    for w in workers:
        w.start()
    x = torch.tensor([row for _, rows in sorted(queue.get() for _ in workers) for row in rows])
    for w in workers:
        w.join()
    print(model(x).mean().item())
    # the actor sees each change of the learner's weights, which lie in memory of both
    model.share_memory()
    observed, actions = mp.Queue(), mp.Queue()
    actor = mp.Process(target=act, args=(model, observed, actions))
    actor.start()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        observed.put(x.tolist())
        acted = torch.tensor(actions.get())
        out = model(x)
        loss = (out - x.sum(1, keepdim=True)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(step, loss.item(), "actor is", (acted - out).abs().max().item() < 1e-12)
    observed.put(None)
    actor.join()
    print(actor.exitcode, model.weight.is_shared())
