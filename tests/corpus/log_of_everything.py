# SPDX-License-Identifier: Apache-2.0
import io
import logging
import sys

import torch

logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO)
sys.stderr = io.StringIO()
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)


class Centred(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) - x.mean(0)


model = Centred()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(12, 4)).square().mean()
    loss.backward()
    optimizer.step()
    logging.info("step %d: %.12f", step, loss.item())
with open("stderr.txt", "w") as file:
    file.write(sys.stderr.getvalue())
