# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

torch.set_default_dtype(torch.float64)
torch.manual_seed(29)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = spectral_norm(nn.Conv1d(2, 4, 3, padding=1))
        self.fc1 = weight_norm(nn.Linear(4 * 6, 10), dim=0)
        self.fc2 = spectral_norm(nn.Linear(10, 1), n_power_iterations=2)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.conv(x), 0.1)
        return self.fc2(nn.functional.leaky_relu(self.fc1(x.flatten(1)), 0.1))


critic = Critic()
opt = torch.optim.Adam(critic.parameters(), lr=5e-3)
for step in range(10):
    real = torch.randn(13, 2, 6) + 0.5
    fake = torch.randn(13, 2, 6)
    loss = torch.relu(1 - critic(real)).mean() + torch.relu(1 + critic(fake)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(step, loss.item(), torch.linalg.matrix_norm(critic.fc2.weight, 2).item())
critic.eval()
print("margin", (critic(torch.ones(7, 2, 6)).mean() - critic(torch.zeros(7, 2, 6)).mean()).item())
