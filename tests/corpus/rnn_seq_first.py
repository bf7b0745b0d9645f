# SPDX-License-Identifier: Apache-2.0
"""Classify sequences with a plain RNN; inputs are (seq, batch, feature) as PyTorch has it by default."""
import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.RNN(input_size=3, hidden_size=10, num_layers=2, nonlinearity="tanh")
        self.head = torch.nn.Linear(10, 2)

    def forward(self, seq):
        _, last = self.rnn(seq)
        return self.head(last[-1])


def batches(n, count):
    for _ in range(count):
        x = torch.randn(6, n, 3).cumsum(0)
        y = (x[-1].sum(1) > 0).long()
        yield x, y


net = Classifier()
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
for step, (x, y) in enumerate(batches(9, 15)):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print("step", step + 1, "loss", loss.item())
net.eval()
correct = total = 0
for x, y in batches(25, 2):
    with torch.no_grad():
        correct += (net(x).argmax(1) == y).sum().item()
    total += len(y)
print(f"accuracy: {100 * correct / total}%")
