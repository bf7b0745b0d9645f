# SPDX-License-Identifier: Apache-2.0
"""Pre-train a net, save it; load it into another one with a new head, freeze the backbone and fine-tune."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import lr_scheduler

torch.manual_seed(21)
torch.set_default_dtype(torch.float64)


def set_parameter_requires_grad(model, feature_extracting):
    if feature_extracting:
        for param in model.parameters():
            param.requires_grad = False


class Backbone(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()
        )
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x):
        return self.fc(self.features(x).mean(-1))


def signals(n, classes):
    y = torch.randint(0, classes, (n,))
    t = torch.linspace(0, 6.28, 16)
    return torch.sin(t[None] * (1.0 + y[:, None])).unsqueeze(1) + 0.3 * torch.randn(n, 1, 16), y


x, y = signals(60, 3)
pretrain = Backbone(3)
opt = torch.optim.SGD(pretrain.parameters(), lr=0.1)
for i in range(0, 60, 16):
    opt.zero_grad()
    loss = F.cross_entropy(pretrain(x[i : i + 16]), y[i : i + 16])
    loss.backward()
    opt.step()
print("pre-training loss:", loss.item())
torch.save(pretrain.state_dict(), "pretrained.pth")

model_ft = Backbone(3)
model_ft.load_state_dict(torch.load("pretrained.pth"))
set_parameter_requires_grad(model_ft, feature_extracting=True)
model_ft.fc = nn.Linear(model_ft.fc.in_features, 2)
params_to_update = []
print("Params to learn:")
for name, param in model_ft.named_parameters():
    if param.requires_grad:
        params_to_update.append(param)
        print("\t", name)
optimizer_ft = torch.optim.SGD(params_to_update, lr=0.05, momentum=0.9)
exp_lr_scheduler = lr_scheduler.ExponentialLR(optimizer_ft, gamma=0.7)
xt, yt = signals(51, 2)
xv, yv = signals(20, 2)
for epoch in range(4):
    if epoch == 2:
        print("unfreezing the last convolution")
        for p in model_ft.features[3].parameters():
            p.requires_grad = True
        optimizer_ft.add_param_group({"params": model_ft.features[3].parameters(), "lr": 0.005})
        exp_lr_scheduler = lr_scheduler.ExponentialLR(optimizer_ft, gamma=0.7)
    model_ft.train()
    model_ft.features.eval()  # keep the running statistics
    for i in range(0, len(xt), 10):
        optimizer_ft.zero_grad()
        loss = F.cross_entropy(model_ft(xt[i : i + 10]), yt[i : i + 10])
        loss.backward()
        optimizer_ft.step()
    exp_lr_scheduler.step()
    model_ft.eval()
    with torch.no_grad():
        out = model_ft(xv)
    acc = (out.argmax(1) == yv).double().mean()
    print(epoch, loss.item(), F.cross_entropy(out, yv).item(), acc.item(), [g["lr"] for g in optimizer_ft.param_groups])
