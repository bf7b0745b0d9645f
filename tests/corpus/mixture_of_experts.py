# SPDX-License-Identifier: Apache-2.0
"""Each row goes to two of four small nets, by a noisy vote; a loss over the whole batch wants all of them at work."""

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(64)


class Committee(nn.Module):
    def __init__(self, width, members=4):
        super().__init__()
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, width)) for _ in range(members)
        )
        self.vote, self.doubt = nn.Linear(width, members, bias=False), nn.Linear(width, members, bias=False)

    def forward(self, rows):
        votes = self.vote(rows)
        if self.training:
            votes = votes + nn.functional.softplus(self.doubt(rows)) * torch.randn_like(votes)
        second = votes.topk(2).values[:, 1:]
        say = votes.masked_fill(votes < second, -torch.inf).softmax(1)
        answer = torch.zeros_like(rows)
        for member, its_say in zip(self.members, say.T):
            asked = its_say.nonzero()[:, 0]
            if len(asked) > 0:
                answer = answer.index_add(0, asked, its_say[asked, None] * member(rows[asked]))
        return answer, (say.mean(0) - 1 / len(self.members)).square().sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.committee, self.after = nn.Linear(5, 10), Committee(10), nn.Linear(10, 3)

    def forward(self, rows):
        answer, unfair = self.committee(self.before(rows))
        return self.after(answer), unfair


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
truth = torch.randn(5, 3)
for step in range(9):
    rows = torch.randn(26, 5)
    scores, unfair = net(rows)
    loss = nn.functional.cross_entropy(scores, (rows @ truth).argmax(1)) + 0.05 * unfair
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print("step", step, "loss", repr(loss.item()), "unfair", repr(unfair.item()))
net.eval()
rows = torch.randn(101, 5)
with torch.no_grad():
    print("right", int((net(rows)[0].argmax(1) == (rows @ truth).argmax(1)).sum()), "of", len(rows))
