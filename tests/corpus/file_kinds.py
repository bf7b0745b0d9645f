# SPDX-License-Identifier: Apache-2.0
"""Writes results in every way that comes to mind, and reads some of them back."""
import json
import os
import pickle
import shutil
import tempfile
import zipfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
i = 1
while os.path.exists(f"runs/exp{i}"):
    i += 1
out = Path(f"runs/exp{i}")
out.mkdir(parents=True)
(out / "weights").mkdir(exist_ok=True)
model = torch.nn.Linear(3, 1)
losses = []
x = torch.randn(14, 3)
for step in range(6):
    loss = (model(x) - x[:, :1]).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    losses.append(loss.item())
    torch.save(model.state_dict(), out / "weights" / f"step{step}.pt")
    old = out / "weights" / f"step{step - 2}.pt"
    if old.exists():
        os.remove(old)
    print(step, sorted(os.listdir(out / "weights")))
np.save(out / "losses.npy", np.array(losses))
np.savez_compressed(out / "arrays.npz", losses=losses, weight=model.weight.detach().numpy())
np.savetxt(out / "losses.csv", losses, delimiter=",", header="loss")
pickle.dump({"losses": losses, "bias": model.bias.detach()}, open(out / "state.pkl", "wb"))
with open(out / "log.txt", "w") as f:
    print("first", file=f)
with open(out / "log.txt", "a") as f:
    f.writelines(f"{v!r}\n" for v in losses)
with open(out / "log.txt", "r+") as f:
    lines = f.readlines()
    f.write(f"{len(lines)} lines\n")
print(open(out / "log.txt").read().splitlines()[-1])
(out / "done.json").write_text(json.dumps({"best": min(losses)}))
shutil.copy(out / "done.json", out / "copy.json")
os.rename(out / "copy.json", out / "renamed.json")
shutil.copytree(out / "weights", out / "backup")
shutil.rmtree(out / "weights")
with zipfile.ZipFile(out / "bundle.zip", "w") as z:
    z.writestr("a.txt", "x")
    z.write(out / "done.json", "done.json")
with tempfile.TemporaryDirectory() as tmp:
    path = os.path.join(tmp, "model.pt")
    torch.save(model, path)
    again = torch.load(path, weights_only=False)
    print("same", torch.equal(again.weight, model.weight))
plt.plot(losses)
plt.savefig(out / "curve.png")
print(json.loads((out / "renamed.json").read_text()), sorted(p.name for p in out.iterdir()))
