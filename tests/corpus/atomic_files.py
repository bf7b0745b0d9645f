# SPDX-License-Identifier: Apache-2.0
"""Files that are written under a temporary name beside their own, and get that once they are whole."""
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(31)
line = torch.nn.Linear(3, 1)
optimizer = torch.optim.RMSprop(line.parameters(), lr=0.02)
Path("kept").mkdir()
for step in range(4):
    points = torch.randn(10, 3)
    loss = (line(points) - points.sum(1, keepdim=True)).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with tempfile.NamedTemporaryFile(dir="kept", delete=False) as file:
        torch.save(line.state_dict(), file)
    os.chmod(file.name, 0o640)
    os.replace(file.name, "kept/line.pt")
    handle, name = tempfile.mkstemp(".json", dir=".")
    with open(handle, "w") as file:
        json.dump({"step": step, "loss": loss.item()}, file)
    shutil.move(name, f"kept/step-{step}.json")
    folder = Path(tempfile.mkdtemp(dir="kept"))
    (folder / "weight.txt").write_text(f"{line.weight[0, 0].item():.12g}\n")
    folder.rename(f"kept/folder-{step}")
    print(step, loss.item(), sorted(os.listdir("kept")), json.loads(Path(f"kept/step-{step}.json").read_text())["step"])
handle, name = tempfile.mkstemp()
os.close(handle)
os.remove(name)
print(oct(os.stat("kept/line.pt").st_mode & 0o777), sorted(os.listdir(".")))
