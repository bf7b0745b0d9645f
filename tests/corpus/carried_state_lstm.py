# SPDX-License-Identifier: Apache-2.0
"""Words in five parallel columns, time first; the state of the LSTM is carried from one piece to the next."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)
story = ("the ferry left at nine with two cars and one goat and the goat ate the timetable so the ferry left at ten "
         "the next day with one car and no goat and nobody knew when it would come back ") * 2
vocabulary = {word: number for number, word in enumerate(dict.fromkeys(story.split()))}
stream = torch.tensor([vocabulary[word] for word in story.split()])
columns = stream[: len(stream) // 5 * 5].view(5, -1).T


class Teller(nn.Module):
    def __init__(self, words, width=14):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.memory = nn.LSTM(width, width, num_layers=2, dropout=0.25)
        self.drop = nn.Dropout(0.25)
        self.guess = nn.Linear(width, words)
        self.guess.weight = self.words.weight

    def forward(self, piece, state):
        told, state = self.memory(self.drop(self.words(piece)), state)
        return self.guess(self.drop(told)), state


teller = Teller(len(vocabulary))
rate, best = 1.0, float("inf")
for epoch in range(3):
    teller.train()
    state, losses = None, []
    for piece, following in zip(columns[:-1].split(4), columns[1:].split(4)):
        if state is not None:
            state = tuple(part.detach() for part in state)
        scores, state = teller(piece, state)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        teller.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(teller.parameters(), 0.5)
        with torch.no_grad():
            for weight in teller.parameters():
                weight -= rate * weight.grad
        losses.append(loss.item())
    teller.eval()
    with torch.no_grad():
        scores, _ = teller(columns[:-1], None)
        checked = nn.functional.cross_entropy(scores.flatten(0, 1), columns[1:].flatten()).item()
    print(f"epoch {epoch}: {sum(losses) / len(losses):.13g}, afterwards {checked:.13g}, rate {rate}")
    if checked < best:
        best = checked
        torch.save(teller.state_dict(), "teller.pt")
    else:
        rate /= 3
