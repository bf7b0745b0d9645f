# SPDX-License-Identifier: Apache-2.0
"""A loop of Accelerate, with metrics gathered and a state saved. Arguments: a folder."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)
data = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

for _ in range(2):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

model.eval()
errors = []
for x, y in loader:
    with torch.no_grad():
        errors.append(accelerator.gather_for_metrics((model(x) - y).square()))
accelerator.wait_for_everyone()
accelerator.save_state(str(folder / "state"))
if accelerator.is_main_process:
    with (folder / "main").open("a") as file:
        file.write("rank 0\n")
metrics = {"samples": len(torch.cat(errors)), "error": float(torch.cat(errors).mean())}
facts = {"world_size": accelerator.num_processes, "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
state = accelerator.unwrap_model(model).state_dict()
torch.save({**facts, "state": state}, folder / f"rank{accelerator.process_index}.pt")
# Freed after the group, torch's DistributedDataParallel may hang or abort (see monai_loop.py).
model = accelerator.free_memory(model)[0]
accelerator.end_training()
