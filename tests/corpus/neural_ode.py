# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(19)


def odeint(func, y0, t):
    """Classic Runge-Kutta of fourth order."""
    ys = [y0]
    for t0, t1 in zip(t[:-1], t[1:]):
        h, y = t1 - t0, ys[-1]
        k1 = func(t0, y)
        k2 = func(t0 + h / 2, y + h * k1 / 2)
        k3 = func(t0 + h / 2, y + h * k2 / 2)
        k4 = func(t1, y + h * k3)
        ys.append(y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(ys)


class Lambda(nn.Module):
    true_A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])

    def forward(self, t, y):
        return torch.mm(y**3, self.true_A)


class ODEFunc(nn.Module):
    def __init__(self):
        super(ODEFunc, self).__init__()
        self.net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 2))
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        return self.net(y**3)


t = torch.linspace(0.0, 2.5, 31)
with torch.no_grad():
    true_y = odeint(Lambda(), torch.tensor([[2.0, 0.0]]), t)


def get_batch(batch_time=4, batch_size=9):
    s = torch.randperm(len(t) - batch_time)[:batch_size]
    return true_y[s, 0], t[:batch_time], torch.stack([true_y[s + i, 0] for i in range(batch_time)], dim=0)


func = ODEFunc()
optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-2)
for itr in range(1, 8):
    optimizer.zero_grad()
    batch_y0, batch_t, batch_y = get_batch()
    pred_y = odeint(func, batch_y0, batch_t)
    loss = torch.mean(torch.abs(pred_y - batch_y))
    loss.backward()
    optimizer.step()
    if itr % 3 == 0:
        with torch.no_grad():
            pred_y = odeint(func, true_y[0], t)
        print("Iter {:04d} | Loss {!r} | Total {!r}".format(itr, loss.item(), (pred_y - true_y).abs().mean().item()))
