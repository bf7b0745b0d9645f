# SPDX-License-Identifier: Apache-2.0
"""Grad-CAM: a hook on a tensor inside of forward() keeps its gradient on the model."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(34)


class VGGish(nn.Module):
    def __init__(self):
        super().__init__()
        self.features_conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU())
        self.max_pool = nn.MaxPool2d(2)
        self.classifier = nn.Linear(5 * 9, 3)
        self.gradients = None

    def activations_hook(self, grad):
        self.gradients = grad

    def forward(self, x):
        x = self.features_conv(x)
        if x.requires_grad:
            x.register_hook(self.activations_hook)
        return self.classifier(self.max_pool(x).flatten(1))

    def get_activations_gradient(self):
        return self.gradients

    def get_activations(self, x):
        return self.features_conv(x)


net = VGGish()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
x = torch.randn(40, 1, 6, 6)
y = x.flatten(1).argmax(1) % 3
for xb, yb in zip(x.split(8), y.split(8)):
    loss = nn.functional.cross_entropy(net(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item(), tuple(net.gradients.shape))
net.eval()
img = x[:7]
pred = net(img)
pred.gather(1, pred.argmax(1, keepdim=True)).sum().backward()
pooled = net.get_activations_gradient().mean(dim=[2, 3], keepdim=True)
heatmap = (net.get_activations(img).detach() * pooled).mean(1).clamp(min=0)
heatmap /= heatmap.amax((1, 2), keepdim=True).clamp_min(1e-12)
print("heat", heatmap.mean((1, 2)).tolist())
torch.save(heatmap, "heatmap.pt")
