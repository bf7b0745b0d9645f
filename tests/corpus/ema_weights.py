# SPDX-License-Identifier: Apache-2.0
import torch


class EMA:
    """Exponential moving average of the parameters, swapped in for evaluation."""

    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters() if p.requires_grad}
        self.backup = {}

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = ((1.0 - self.decay) * param.data + self.decay * self.shadow[name]).clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                param.data = self.backup[name]
        self.backup = {}


torch.set_default_dtype(torch.float64)
torch.manual_seed(77)
model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
ema = EMA(model, 0.8)
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
X = torch.randn(83, 4)
Y = (X**2).sum(1, keepdim=True)
Xv = torch.randn(31, 4)
Yv = (Xv**2).sum(1, keepdim=True)
for epoch in range(3):
    perm = torch.randperm(len(X))
    for i in range(0, len(X), 9):
        b = perm[i : i + 9]
        loss = (model(X[b]) - Y[b]).pow(2).mean()
        opt.zero_grad(); loss.backward(); opt.step(); ema.update()
    raw = (model(Xv) - Yv).pow(2).mean().item()
    ema.apply_shadow()
    avg = (model(Xv) - Yv).pow(2).mean().item()
    ema.restore()
    print(epoch, "raw", raw, "ema", avg)
torch.save(ema.shadow, "shadow.bin")
