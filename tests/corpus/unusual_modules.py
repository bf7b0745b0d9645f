# SPDX-License-Identifier: Apache-2.0
"""Classes made in functions, a decorated forward, a __call__ of its own, forward() called by hand, methods that train."""
import functools
from dataclasses import dataclass

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(277)
counts = {}


def counted(f):
    @functools.wraps(f)
    def inner(*args, **kwargs):
        counts[f.__qualname__.split(".")[0]] = counts.get(f.__qualname__.split(".")[0], 0) + 1
        return f(*args, **kwargs)

    return inner


def residual(of):
    class Residual(of):
        def forward(self, x):
            return x + super().forward(x)

    Residual.__name__ = Residual.__qualname__ = f"Residual{of.__name__}"
    return Residual


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = residual(nn.Linear)(5, 5)
        self.out = nn.Linear(5, 1)

    @counted
    def forward(self, x):
        return self.out(self.fc(x).tanh())


class Called(Counted):
    def __call__(self, x, twice=False):
        out = super().__call__(x)
        return out * 2 if twice else out


@dataclass(eq=False)
class Data(nn.Module):
    width: int
    slope: float = 0.1

    def __post_init__(self):
        super().__init__()
        self.fc = nn.Linear(5, self.width)
        self.act = lambda v: nn.functional.leaky_relu(v, self.slope)

    def __getattr__(self, name):
        if name == "alias":
            return self.fc
        return super().__getattr__(name)

    def forward(self, x):
        return self.act(self.alias(x)).sum(1, keepdim=True)


class Learner(nn.Module):
    """Has its own optimizer, its own step, and other ways in than forward()."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 3), nn.Linear(3, 5)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        self.history = []

    def encode(self, x):
        return self.encoder(x).sigmoid()

    def forward(self, x):
        return self.decoder(self.encode(x))

    def learn(self, x):
        loss = (self(x) - x).square().mean() + 0.1 * self.encode(x).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.item())
        return self.history[-1]


x = torch.randn(46, 5)
y = x.amax(1, keepdim=True)
for make in (Counted, Called, functools.partial(Data, 7)):
    model = make()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, rows in enumerate(torch.randperm(46).split(8)):
        if isinstance(model, Called) and step % 2:
            out = model(x[rows], twice=True)
        elif step == 4:
            out = model.forward(x[rows])  # no hooks this way
        else:
            out = model(x[rows])
        if isinstance(model, Data):
            model.slope += 0.05
        loss = nn.functional.mse_loss(out, y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(type(model).__name__, loss.item(), counts)
learner = Learner()
print([learner.learn(rows) for rows in x.split(9)], len(learner.history))
print(learner.encode(x).sum().item(), learner.decoder(learner.encode(x)).sum().item())
learner.apply(lambda m: nn.init.constant_(m.weight, 0.1) if isinstance(m, nn.Linear) else None)
print(learner(x).sum().item(), [type(m).__name__ for m in model.modules()])
