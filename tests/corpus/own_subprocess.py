# SPDX-License-Identifier: Apache-2.0
"""Notes the commit it runs at, packs its result by a program, and follows another program's output line by line."""
import os
import subprocess
import sys

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or "unknown"
model = torch.nn.Linear(3, 2)
x = torch.randn(29, 3)
for part in x.split(8):
    loss = model(part).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
torch.save({"model": model.state_dict(), "commit": commit}, "model.pt")
subprocess.check_call(["gzip", "-k", "model.pt"])
subprocess.check_call("gunzip -c model.pt.gz > again.pt", shell=True)
os.remove("model.pt.gz")
print(loss.item(), os.path.getsize("again.pt") == os.path.getsize("model.pt"), flush=True)
steps = "import time\nfor i in range(4):\n    print(i * i, flush=True)\n    time.sleep(0.01)"
with subprocess.Popen([sys.executable, "-u", "-c", steps], stdout=subprocess.PIPE, text=True) as sampler:
    for line in sampler.stdout:
        with torch.no_grad():
            print("line", line.strip(), model(x * int(line)).sum().item(), flush=True)
print("ended with", sampler.returncode, flush=True)
subprocess.run(["ls"], check=True)
try:
    subprocess.run([sys.executable, "-c", "import sys; sys.exit(4)"], check=True)
except subprocess.CalledProcessError as error:
    print("failed with", error.returncode)
