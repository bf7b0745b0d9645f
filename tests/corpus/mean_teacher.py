# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_moons

torch.set_default_dtype(torch.float64)


def get_current_consistency_weight(epoch, rampup=4):
    current = np.clip(epoch, 0.0, rampup)
    phase = 1.0 - current / rampup
    return float(np.exp(-5.0 * phase * phase))


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters()):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def create_model(ema=False):
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    if ema:
        for param in model.parameters():
            param.detach_()
    return model


def main():
    torch.manual_seed(8)
    X, y = make_moons(90, noise=0.1, random_state=8)
    X, y = torch.tensor(X), torch.tensor(y)
    labelled = torch.utils.data.TensorDataset(X[:14], y[:14])
    unlabelled = torch.utils.data.TensorDataset(X[14:])
    lab_loader = torch.utils.data.DataLoader(labelled, batch_size=5, shuffle=True)
    unl_loader = torch.utils.data.DataLoader(unlabelled, batch_size=19, shuffle=True)
    model, ema_model = create_model(), create_model(ema=True)
    ema_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    step = 0
    for epoch in range(4):
        for (xl, yl), (xu,) in zip(itertools.cycle(lab_loader), unl_loader):
            n = len(xl)
            both = torch.cat([xl, xu])
            student = model(both + 0.05 * torch.randn_like(both))
            with torch.no_grad():
                teacher = ema_model(both + 0.05 * torch.randn_like(both))
            cls = F.cross_entropy(student[:n], yl)
            cons = F.mse_loss(student.softmax(1), teacher.softmax(1))
            loss = cls + 3 * get_current_consistency_weight(epoch) * cons
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            update_ema_variables(model, ema_model, 0.95, step)
        ema_model.eval()
        acc = (ema_model(X).argmax(1) == y).double().mean().item()
        ema_model.train()
        print(f"Epoch {epoch} class {cls.item():.12g} cons {cons.item():.12g} teacher accuracy {acc:.6f}")


if __name__ == "__main__":
    main()
