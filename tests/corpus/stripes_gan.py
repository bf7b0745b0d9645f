# SPDX-License-Identifier: Apache-2.0
"""Two nets against each other over striped pictures: two optimizers, softened answers, noise in the loop."""
import torch
from torch import nn

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
pictures = torch.stack([torch.roll(torch.eye(8), shift, 1) * 2 - 1 for shift in range(31)]).unsqueeze(1)
forger = nn.Sequential(
    nn.Linear(5, 32), nn.ReLU(), nn.Unflatten(1, (8, 2, 2)), nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6),
    nn.ReLU(), nn.ConvTranspose2d(6, 1, 4, 2, 1), nn.Tanh(),
)
judge = nn.Sequential(
    nn.Conv2d(1, 6, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.1),
    nn.Dropout2d(0.1), nn.Flatten(), nn.Linear(32, 1),
)
sentence = nn.BCEWithLogitsLoss()
by_forger = torch.optim.RMSprop(forger.parameters(), lr=1e-3)
by_judge = torch.optim.RMSprop(judge.parameters(), lr=1e-3)
history = []
for night in range(2):
    for real in torch.utils.data.DataLoader(pictures, batch_size=9, shuffle=True):
        fake = forger(torch.randn(len(real), 5))
        almost_one = 0.85 + 0.1 * torch.rand(len(real), 1)
        loss_judge = sentence(judge(real), almost_one) + sentence(judge(fake.detach()), torch.zeros(len(real), 1))
        by_judge.zero_grad()
        loss_judge.backward()
        by_judge.step()
        verdict = judge(fake)
        loss_forger = sentence(verdict, torch.ones_like(verdict))
        by_forger.zero_grad()
        loss_forger.backward()
        by_forger.step()
        history.append((loss_judge.item(), loss_forger.item()))
        print(night, *map(repr, history[-1]), "fooled", int((verdict > 0).sum()))
torch.save({"history": torch.tensor(history), "forger": forger.state_dict()}, "forger.pt")
