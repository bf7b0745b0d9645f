# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.autograd import Function


class Quantize(Function):
    """Rounds in the forward pass, passes gradients straight through where |x| <= 1."""

    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        return torch.round(x * levels) / levels

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x.abs() <= 1).to(grad_output), None


class GradReverse(Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.alpha * grad, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 12), nn.Tanh())
        self.label = nn.Linear(12, 2)
        self.domain = nn.Linear(12, 2)

    def forward(self, x, alpha):
        f = Quantize.apply(self.features(x), 8.0)
        return self.label(f), self.domain(GradReverse.apply(f, alpha))


torch.set_default_dtype(torch.float64)
torch.manual_seed(58)
net = DANN()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
src, tgt = torch.randn(50, 4), torch.randn(50, 4) + 0.5
y = (src[:, 0] > 0).long()
for epoch in range(3):
    for i in range(0, 50, 9):
        p = (epoch * 50 + i) / 150
        s, t = src[i : i + 9], tgt[i : i + 9]
        cls, dom_s = net(s, alpha=p)
        _, dom_t = net(t, alpha=p)
        loss = (
            nn.functional.cross_entropy(cls, y[i : i + 9])
            + nn.functional.cross_entropy(dom_s, torch.zeros(len(s), dtype=torch.long))
            + nn.functional.cross_entropy(dom_t, torch.ones(len(t), dtype=torch.long))
        )
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"[{epoch}] alpha {p:.6f} loss {loss.item():.12g}")
