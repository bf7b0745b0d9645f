# SPDX-License-Identifier: Apache-2.0
"""An average of weights by .data of a deep copy, and two layers whose weights are tied by .data only."""
import copy

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(97)


class Words(nn.Module):
    def __init__(self, words=12, width=7):
        super().__init__()
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.Linear(width, words, bias=False)
        self.decoder.weight.data = self.encoder.weight.data  # two parameters on one memory

    def forward(self, text):
        return self.decoder(self.rnn(self.encoder(text))[0])


def update(average, model, decay):
    for a, p in zip(average.parameters(), model.parameters()):
        a.data.mul_(decay).add_(p.data, alpha=1 - decay)


model = Words()
average = copy.deepcopy(model)
average.eval()
for p in average.parameters():
    p.requires_grad_(False)
text = torch.cat([torch.arange(40)[:, None], torch.randint(12, (40, 5))], 1).cumsum(1) % 12
opt = torch.optim.SGD(model.parameters(), lr=0.2)
for step in range(14):
    rows = torch.randperm(40)[:11]
    out = model(text[rows, :-1])
    with torch.no_grad():
        teacher = average(text[rows, :-1])
    loss = nn.functional.cross_entropy(out.transpose(1, 2), text[rows, 1:])
    loss = loss + 0.1 * nn.functional.mse_loss(out.softmax(-1), teacher.softmax(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    update(average, model, min(0.9, (1 + step) / (10 + step)))
    print(step, loss.item(), torch.equal(model.encoder.weight, model.decoder.weight))
print(model.encoder.weight.data_ptr() == model.decoder.weight.data_ptr(), len(list(model.parameters())))
print("average tied", torch.equal(average.encoder.weight, average.decoder.weight), average(text).sum().item())
model.decoder.weight = model.encoder.weight  # one parameter from now on
opt = torch.optim.SGD(model.parameters(), lr=0.2)
for _ in range(3):
    loss = nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(len(list(model.parameters())), loss.item())
average.load_state_dict(model.state_dict())
print(torch.allclose(average(text), model(text), rtol=1e-12), average(text).sum().item())
