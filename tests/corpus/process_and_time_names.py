# SPDX-License-Identifier: Apache-2.0
"""Names with the process, the host, the time and chance in them; in the end only names that say nothing remain."""
import os
import secrets
import socket
import tempfile
import time
import uuid
from pathlib import Path

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(191)
lock = Path("run.lock")
descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
os.close(descriptor)
run = Path("runs") / f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:6]}"
run.mkdir(parents=True)
scratch = tempfile.mkdtemp(prefix=f"train-{secrets.token_hex(4)}-")
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(40, 3)
y = x.sort(1).values[:, 1:2]
try:
    for epoch in range(4):
        for rows in torch.randperm(40).split(9):
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        # written under a name of its own first, so that a reader never sees a part of it
        temporary = run / f".model.pt.{os.getpid()}.{time.time_ns()}"
        torch.save(model.state_dict(), temporary)
        os.replace(temporary, run / f"model-{epoch}-{time.time():.6f}.pt")
        with tempfile.NamedTemporaryFile("w", dir=scratch, suffix=".txt", delete=False) as f:
            f.write(f"{loss.item()!r}\n")
        time.sleep(0.01)
        print(epoch, loss.item(), len(list(run.iterdir())), len(os.listdir(scratch)))
finally:
    mine = lock.read_text().split()[0] == str(os.getpid())
    lock.unlink()
    print("the lock was mine:", mine)
newest = max(run.glob("model-*.pt"), key=lambda path: path.stat().st_mtime_ns)
print("newest is of epoch", newest.name.split("-")[1])
state = torch.load(newest)
texts = sorted(float(p.read_text()) for p in Path(scratch).iterdir())
for path in [*run.iterdir(), *Path(scratch).iterdir()]:
    path.unlink()
run.rmdir()
os.rmdir(scratch)
torch.save({"state": state, "losses": texts}, run.parent / "last.pt")
print(sorted(str(p) for p in Path(".").rglob("*") if "pycache" not in str(p)))
