# SPDX-License-Identifier: Apache-2.0
"""Ends with an exit code of its own when the loss explodes, after it has saved the last state."""
import sys

import torch

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=4.0)
x = torch.randn(13, 2)
try:
    for step in range(1000):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        if not loss.item() < 1e6:
            raise FloatingPointError(f"loss is {loss.item():.10g} in step {step}")
        opt.zero_grad()
        loss.backward()
        opt.step()
except FloatingPointError as error:
    print("stopped:", error)
    torch.save(model.state_dict(), "last.pt")
    sys.exit(3)
