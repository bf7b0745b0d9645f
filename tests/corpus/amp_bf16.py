# SPDX-License-Identifier: Apache-2.0
"""Products in 16 bits, the loss in 32; on a GPU the loss is scaled, so that small gradients do not vanish."""
import torch
from torch import nn

torch.manual_seed(0)
place = "cuda" if torch.cuda.is_available() else "cpu"
short = {"cuda": torch.float16, "cpu": torch.bfloat16}[place]
net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).to(place)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler(place, enabled=place == "cuda")
rows = torch.randn(184, 16, device=place)
wanted = torch.tanh(rows[:, 4:8])
for epoch in range(2):
    for part, aim in zip(rows.split(23), wanted.split(23)):
        optimizer.zero_grad()
        with torch.autocast(place, dtype=short):
            guess = net(part)
            loss = nn.functional.mse_loss(guess, aim)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    print("epoch", epoch, "loss", loss.item(), "of", loss.dtype, "from", guess.dtype, "scale", scaler.get_scale())
torch.save({"net": net.state_dict(), "steps": optimizer.state_dict(), "scale": scaler.state_dict()}, "half.pt")
