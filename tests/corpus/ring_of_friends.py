# SPDX-License-Identifier: Apache-2.0
"""Each person is told apart by their friends: all people are one graph, and one step sees all of it."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
PEOPLE = 26
knows = torch.eye(PEOPLE)
for one in range(PEOPLE):
    for other in ((one + 1) % PEOPLE, (one + 3) % PEOPLE if one < 13 else (one + 2) % PEOPLE):
        knows[one, other] = knows[other, one] = 1
share = knows / knows.sum(1, keepdim=True)


class Listening(nn.Module):
    def __init__(self, inward, outward):
        super().__init__()
        self.weigh = nn.Linear(inward, outward)

    def forward(self, people, share):
        return share @ self.weigh(people)


class Circle(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = Listening(PEOPLE, 12), Listening(12, 2)

    def forward(self, people, share):
        return self.far(nn.functional.dropout(self.near(people, share).relu(), 0.3, self.training), share)


circle, side = Circle(), (torch.arange(PEOPLE) >= 13).long()
optimizer = torch.optim.Adam(circle.parameters(), lr=0.02, weight_decay=1e-3)
told = torch.tensor([0, 5, 14, 22])
for step in range(10):
    circle.train()
    loss = nn.functional.cross_entropy(circle(torch.eye(PEOPLE), share)[told], side[told])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    circle.eval()
    with torch.no_grad():
        right = (circle(torch.eye(PEOPLE), share).argmax(1) == side).sum().item()
    print(step, repr(loss.item()), "right", right)
