# SPDX-License-Identifier: Apache-2.0
"""A small CRNN with CTC loss; outputs are (time, batch, class), lengths are given per sample."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(81)
CHARS = "-abcd"


class CRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)))
        self.map = nn.Linear(6 * 3, 10)
        self.rnn = nn.GRU(10, 8, bidirectional=True)
        self.fc = nn.Linear(16, len(CHARS))

    def forward(self, images):
        f = self.cnn(images)
        b, c, h, w = f.shape
        seq = self.map(f.permute(3, 0, 1, 2).reshape(w, b, c * h))
        out, _ = self.rnn(seq)
        return self.fc(out)


def render(word):
    img = 0.1 * torch.randn(1, 6, 12)
    for i, ch in enumerate(word):
        img[0, CHARS.index(ch), 3 * i : 3 * i + 2] += 1
    return img


words = ["".join(CHARS[1 + int(i)] for i in torch.randint(0, 4, (int(torch.randint(2, 5, ())),))) for _ in range(34)]
images = torch.stack([render(w) for w in words])
net = CRNN()
opt = torch.optim.Adam(net.parameters(), lr=0.01)
ctc = nn.CTCLoss(blank=0, zero_infinity=True)
for epoch in range(2):
    total = 0.0
    for start in range(0, 34, 9):
        batch = words[start : start + 9]
        log_probs = net(images[start : start + 9]).log_softmax(2)
        targets = torch.tensor([CHARS.index(c) for w in batch for c in w])
        lengths = torch.tensor([len(w) for w in batch])
        loss = ctc(log_probs, targets, torch.full((len(batch),), log_probs.size(0)), lengths)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(batch)
    print(f"Epoch {epoch}: ctc {total / 34:.12g}")
best = net(images[:3]).argmax(2).T
print([("".join(CHARS[i] for i in row.unique_consecutive().tolist() if i)) for row in best], words[:3])
