# SPDX-License-Identifier: Apache-2.0
"""Settings of torch around a call: autocast, generators, saved tensors, function modes, anomalies, a default device."""
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

torch.set_default_dtype(torch.float64)
torch.manual_seed(223)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


class Net(nn.Module):
    def __init__(self, chance):
        super().__init__()
        self.a, self.b = nn.Linear(4, 12), nn.Linear(12, 2)
        self.chance = chance

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = h + 0.1 * torch.empty_like(h).normal_(generator=self.chance)
        if torch.is_autocast_enabled("cpu"):
            h = h * 0.5
        if torch.are_deterministic_algorithms_enabled():
            h = h + 0.25
        return self.b(h)


chance = torch.Generator().manual_seed(5)
net = Net(chance)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(50, 4)
y = (x[:, 0] > 0).long()


def step(name):
    rows = torch.randperm(50)[:13]
    loss = nn.functional.cross_entropy(net(x[rows]).double(), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(name, loss.item())


for number in range(6):
    step(number)
chance.manual_seed(9)
step("seeded again")
state = chance.get_state()
step("next numbers")
chance.set_state(state)
step("numbers once more")
net.chance = torch.Generator().manual_seed(7)
step("another generator")
torch.use_deterministic_algorithms(True)
step("deterministic")
torch.use_deterministic_algorithms(False)
step("as before")
with Doubled():
    step("a mode of functions")
step("as before")
with torch.autograd.detect_anomaly(check_nan=True):
    step("anomalies")
saved = []
with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t.clone(), lambda t: t):
    step("hooks of saved tensors")
print(len(saved) > 0)
with torch.autograd.graph.save_on_cpu():
    step("saved on the CPU")
with torch.device("cpu"):
    step("a default device")
with torch.autocast("cpu", dtype=torch.bfloat16):
    with torch.no_grad():
        print(net(x[:7]).dtype, net.a(x).dtype)
with torch.random.fork_rng():
    torch.manual_seed(1)
    step("forked numbers")
step("numbers continue")
torch.set_num_threads(1)
torch.autograd.set_grad_enabled(False)
print(net(x).requires_grad, net(x).sum().item())
print(torch.rand(()).item(), chance.initial_seed(), torch.initial_seed())
