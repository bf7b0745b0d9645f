# SPDX-License-Identifier: Apache-2.0
"""Processes of many kinds: os.fork, a pool that forks, ProcessPoolExecutor with spawn, programs through a shell."""
import multiprocessing as mp
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor


def shape(number):
    """A sample, made in a process of its own."""
    import random

    chance = random.Random(number)
    return [chance.uniform(-1, 1) for _ in range(4)], number % 3


def main():
    import torch
    from torch import nn

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(173)
    with mp.get_context("fork").Pool(2) as pool:
        pairs = pool.map(shape, range(40))
    with ProcessPoolExecutor(2, mp_context=mp.get_context("spawn")) as pool:
        pairs += pool.map(shape, range(40, 57))
    x = torch.tensor([p[0] for p in pairs])
    y = torch.tensor([p[1] for p in pairs])
    model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    width = os.popen("stty size 2>/dev/null").read().split() or ["24", "80"]
    print("width", width[1], flush=True)
    for epoch in range(2):
        for rows in torch.randperm(57).split(10):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item(), flush=True)
        torch.save(model.state_dict(), "model.pt")
        subprocess.run("cp model.pt copy.pt && echo saved >> shell.log", shell=True, check=True)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # evaluates what the parent has, and says it through the pipe
        with torch.no_grad():
            os.write(writer, repr(model(x[:1]).sum().item()).encode())
        os._exit(7)
    os.close(writer)
    said = float(os.read(reader, 100))
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said == model(x[:1]).sum().item(), said)
    code = "import sys, json; print(json.dumps({'python': sys.argv[1:], 'sum': sum(map(int, sys.stdin))}))"
    ended = subprocess.run([sys.executable, "-c", code, "a", "b"], input="1\n2\n", capture_output=True, text=True)
    print(ended.stdout.strip(), ended.returncode)
    print("shell says", os.system("test -s model.pt"), os.system("exit 3") >> 8, open("shell.log").read().split())


if __name__ == "__main__":
    main()
