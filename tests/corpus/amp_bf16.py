# SPDX-License-Identifier: Apache-2.0
"""Mixed precision as the recipe has it: autocast (bfloat16 on a CPU) and a GradScaler that is off there."""
import torch
import torch.nn as nn

use_amp = True
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(nn.Linear(in_size, in_size))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers).to(device)


batch_size, in_size, out_size = 23, 16, 4
data = [torch.randn(batch_size, in_size) for _ in range(8)]
targets = [d[:, :out_size].tanh() for d in data]
loss_fn = nn.MSELoss().to(device)
net = make_model(in_size, out_size, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.05)
scaler = torch.amp.GradScaler(device, enabled=use_amp and device == "cuda")

for epoch in range(2):
    for input, target in zip(data, targets):
        with torch.autocast(device_type=device, dtype=dtype, enabled=use_amp):
            output = net(input)
            assert output.dtype is dtype
            loss = loss_fn(output, target)
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    print(f"epoch {epoch} loss {loss.item():.8g} scale {scaler.get_scale()}")
torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}, "filename.pt")
