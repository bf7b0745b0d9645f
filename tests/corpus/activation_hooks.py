# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(35)
activations = {}


def get_activation(name):
    def hook(model, input, output):
        activations[name] = output.detach()

    return hook


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 14)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(14, 3)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


model = Net()
model.fc1.register_forward_hook(get_activation("fc1"))
model.act.register_forward_hook(get_activation("act"))
calls = []
model.register_forward_pre_hook(lambda m, args: calls.append(tuple(args[0].shape)))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data, labels = torch.randn(39, 5), torch.randint(0, 3, (39,))
for epoch in range(2):
    for xb, yb in zip(data.split(8), labels.split(8)):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    dead = (activations["act"] == 0).double().mean(0)
    print(f"epoch {epoch} loss {loss.item():.12g} act shape {tuple(activations['act'].shape)} dead {dead.mean().item():.6f} "
          f"fc1 mean {activations['fc1'].mean().item():.12g}")
print(len(calls), "calls", calls[-3:])
