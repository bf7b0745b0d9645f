# SPDX-License-Identifier: Apache-2.0
"""Sharpness-aware minimisation: two passes per step, weights are moved in between."""
import torch


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = torch.norm(
            torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]), p=2
        )
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


def disable_running_stats(model):
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm1d):
            m.backup_momentum, m.momentum = m.momentum, 0


def enable_running_stats(model):
    for m in model.modules():
        if isinstance(m, torch.nn.BatchNorm1d) and hasattr(m, "backup_momentum"):
            m.momentum = m.backup_momentum


torch.set_default_dtype(torch.float64)
torch.manual_seed(91)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
)
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)
x, y = torch.randn(47, 5), torch.randint(0, 3, (47,))
for epoch in range(2):
    for xb, yb in zip(x.split(9), y.split(9)):
        enable_running_stats(model)
        loss = torch.nn.functional.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        disable_running_stats(model)
        torch.nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.second_step(zero_grad=True)
    print(epoch, loss.item(), model[1].running_var.sum().item())
torch.save(model.state_dict(), "sam.pt")
