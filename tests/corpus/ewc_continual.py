# SPDX-License-Identifier: Apache-2.0
"""Elastic weight consolidation: the Fisher information of the first task is made of gradients of single samples."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(61)


class EWC:
    def __init__(self, model, dataset):
        self.model = model
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.means = {n: p.detach().clone() for n, p in self.params.items()}
        self.fisher = self._diag_fisher(dataset)

    def _diag_fisher(self, dataset):
        fisher = {n: torch.zeros_like(p) for n, p in self.params.items()}
        self.model.eval()
        for x, _ in dataset:
            self.model.zero_grad()
            output = self.model(x.unsqueeze(0)).view(1, -1)
            label = output.max(1)[1].view(-1)
            loss = F.nll_loss(F.log_softmax(output, dim=1), label)
            loss.backward()
            for n, p in self.model.named_parameters():
                fisher[n].data += p.grad.data**2 / len(dataset)
        return fisher

    def penalty(self, model):
        return sum((self.fisher[n] * (p - self.means[n]) ** 2).sum() for n, p in model.named_parameters())


def task(shift):
    x = torch.randn(48, 4) + shift
    return x, ((x - shift).sum(1) > 0).long()


model = nn.Sequential(nn.Linear(4, 14), nn.ReLU(), nn.Linear(14, 2))
tasks = [task(0.0), task(1.5)]
ewc = None
for number, (x, y) in enumerate(tasks):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for xb, yb in zip(x.split(11), y.split(11)):
        loss = F.cross_entropy(model(xb), yb)
        if ewc is not None:
            loss = loss + 20.0 * ewc.penalty(model)
        opt.zero_grad()
        loss.backward()
        opt.step()
    accuracies = [(model(a).argmax(1) == b).double().mean().item() for a, b in tasks]
    print("after task", number, "loss", loss.item(), "accuracies", accuracies)
    ewc = EWC(model, list(zip(x[:9], y[:9])))
print("fisher", {n: f.sum().item() for n, f in ewc.fisher.items()})
