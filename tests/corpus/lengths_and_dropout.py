# SPDX-License-Identifier: Apache-2.0
"""Every batch has another length and another number of rows; a transformer with dropout; the scores come out flat."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(103)
VOCABULARY = 17


class LanguageModel(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.width = width
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 3, 24, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, text):
        length = text.size(1)
        hidden = self.words(text) * self.width**0.5 + self.places(torch.arange(length))
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = self.layers(hidden, mask=mask)
        return self.out(hidden).view(-1, VOCABULARY)


model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(ignore_index=0)
total = tokens = 0
for step in range(24):
    length = int(torch.randint(4, 20, ()))
    size = int(torch.randint(3, 11, ()))
    text = (torch.arange(length + 1) * torch.randint(1, 5, (size, 1)) + torch.randint(VOCABULARY, (size, 1))) % VOCABULARY
    given, wanted = text[:, :-1], text[:, 1:]
    loss = criterion(model(given), wanted.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    total, tokens = total + loss.item() * wanted.numel(), tokens + wanted.numel()
    if step % 4 == 3:
        print(step, size, length, loss.item(), total / tokens)
model.eval()
with torch.no_grad():
    text = torch.randint(1, VOCABULARY, (5, 1))
    for _ in range(6):
        scores = model(text).view(5, -1, VOCABULARY)[:, -1]
        text = torch.cat([text, torch.multinomial(scores.softmax(1), 1)], 1)
print(text.tolist())
