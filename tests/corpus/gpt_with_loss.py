# SPDX-License-Identifier: Apache-2.0
"""Letters predict the next letter; the model returns its scores and, when it knows the answer, the loss."""
import torch
from torch import nn

torch.manual_seed(7)
torch.set_default_dtype(torch.float64)
verse = "how many ranks does it take to change a light bulb? all of them, and each must agree that it is dark. " * 3
alphabet = sorted(set(verse))
codes = torch.tensor([alphabet.index(letter) for letter in verse])
WINDOW = 10


class Layer(nn.Module):
    def __init__(self, width, drop):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look = nn.MultiheadAttention(width, 2, dropout=drop, batch_first=True)
        wide = 3 * width
        self.think = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width), nn.Dropout(drop))

    def forward(self, h, future):
        n = self.before(h)
        h = h + self.look(n, n, n, attn_mask=future, need_weights=False)[0]
        return h + self.think(self.between(h))


class LetterModel(nn.Module):
    def __init__(self, letters, width=12, depth=2, drop=0.15):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(WINDOW, width)
        self.layers = nn.ModuleList([Layer(width, drop) for _ in range(depth)])
        self.register_buffer("future", torch.ones(WINDOW, WINDOW, dtype=torch.bool).triu(1))

    def forward(self, seen, answer=None):
        h = self.letter(seen) + self.place.weight
        for layer in self.layers:
            h = layer(h, self.future)
        scores = h @ self.letter.weight.T
        if answer is None:
            return scores, None
        return scores, nn.functional.cross_entropy(scores.flatten(0, 1), answer.flatten(), ignore_index=-1)


model = LetterModel(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for turn in range(9):
    pieces = codes.unfold(0, WINDOW + 1, 1)[torch.randint(len(codes) - WINDOW, (7,))]
    seen, answer = pieces[:, :-1], pieces[:, 1:].clone()
    answer[:, : turn % 3] = -1
    _, loss = model(seen, answer)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("turn", turn, "loss", repr(loss.item()))
model.eval()
with torch.no_grad():
    scores, _ = model(codes[:WINDOW].repeat(3, 1))
print("".join(alphabet[i] for i in scores[0].argmax(-1).tolist()), repr(scores.sum().item()))
