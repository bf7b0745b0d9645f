# SPDX-License-Identifier: Apache-2.0
"""Reads handwritten digits; sizes and rates are options of the command line."""
import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitReader(nn.Module):
    def __init__(self, hidden, dropout):
        super().__init__()
        self.inner = nn.Linear(64, hidden)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(hidden, 10)

    def forward(self, pixels):
        return self.outer(self.dropout(self.inner(pixels).relu()))


class Course:
    def __init__(self, options):
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pixels, digits = load_digits(return_X_y=True)
        pairs = TensorDataset(torch.from_numpy(pixels[:500]) / 16, torch.from_numpy(digits[:500]))
        lessons, exam = random_split(pairs, [350, 150], torch.Generator().manual_seed(options.seed))
        self.lessons = DataLoader(lessons, options.batch_size, shuffle=True)
        self.exam = DataLoader(exam, 100)
        self.reader = DigitReader(options.hidden, options.dropout).to(self.device)
        self.optimizer = torch.optim.SGD(self.reader.parameters(), options.lr, momentum=0.9)

    def scored(self, loader):
        for pixels, digits in loader:
            digits = digits.to(self.device)
            scores = self.reader(pixels.to(self.device))
            yield nn.functional.cross_entropy(scores, digits), (scores.argmax(1) == digits).sum().item()

    def learn(self, epoch):
        self.reader.train()
        for number, (loss, right) in enumerate(self.scored(self.lessons)):
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if number % self.options.log_every == 0:
                print(f"epoch {epoch}, batch {number} of {len(self.lessons)}: loss {loss.item():.12g}, {right} right")

    @torch.no_grad()
    def examine(self):
        self.reader.eval()
        losses, rights = zip(*self.scored(self.exam))
        print(f"exam: losses {[round(loss.item(), 9) for loss in losses]}, {sum(rights)} of 150 right")


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=61)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=33, help="size of the inner layer")
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--log-every", type=int, default=2, help="batches between two lines")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    given = options()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(given.seed)
    course = Course(given)
    for epoch in range(given.epochs):
        course.learn(epoch)
        course.examine()
