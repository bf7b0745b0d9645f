# SPDX-License-Identifier: Apache-2.0
import copy

import torch
from torch import nn


class LRFinder:
    def __init__(self, model, optimizer, criterion):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.history = {"lr": [], "loss": []}
        self.model_state = copy.deepcopy(model.state_dict())
        self.optim_state = copy.deepcopy(optimizer.state_dict())

    def reset(self):
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(self.optim_state)

    def range_test(self, batches, start_lr, end_lr, num_iter, smooth_f=0.05, diverge_th=3):
        for g in self.optimizer.param_groups:
            g["lr"] = start_lr
        gamma = (end_lr / start_lr) ** (1 / (num_iter - 1))
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)
        best = None
        for iteration in range(num_iter):
            x, y = batches[iteration % len(batches)]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            loss = loss.item()
            self.history["lr"].append(schedule.get_last_lr()[0])
            schedule.step()
            if iteration > 0:
                loss = smooth_f * loss + (1 - smooth_f) * self.history["loss"][-1]
            best = loss if best is None else min(best, loss)
            self.history["loss"].append(loss)
            if loss > diverge_th * best:
                print("Stopping early, the loss has diverged at iteration", iteration)
                break

    def suggestion(self):
        losses = self.history["loss"]
        slopes = [b - a for a, b in zip(losses, losses[1:])]
        return self.history["lr"][slopes.index(min(slopes))]


torch.set_default_dtype(torch.float64)
torch.manual_seed(88)
x = torch.randn(66, 6)
y = x[:, :1] - 0.5 * x[:, 1:2] ** 2
batches = list(zip(x.split(13), y.split(13)))
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=1e-5)
finder = LRFinder(net, opt, nn.MSELoss())
finder.range_test(batches, 1e-4, 3.0, 20)
lr = finder.suggestion()
print(f"suggested lr: {lr:.12g} after {len(finder.history['lr'])} iterations")
finder.reset()
opt.param_groups[0]["lr"] = lr
for xb, yb in batches:
    opt.zero_grad()
    loss = nn.functional.mse_loss(net(xb), yb)
    loss.backward()
    opt.step()
print("loss after an epoch with it:", loss.item())
