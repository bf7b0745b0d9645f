# SPDX-License-Identifier: Apache-2.0
"""Optimise an input through a frozen network (deep dream, style transfer), with LBFGS and total variation."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(72)
cnn = nn.Sequential(
    nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()
).eval()
for p in cnn.parameters():
    p.requires_grad_(False)


def gram_matrix(input):
    a, b, c, d = input.size()
    features = input.view(a * b, c * d)
    return torch.mm(features, features.t()).div(a * b * c * d)


content_img, style_img = torch.rand(1, 3, 12, 12), torch.rand(1, 3, 12, 12)
content_target, style_target = cnn(content_img).detach(), gram_matrix(cnn(style_img)).detach()
input_img = content_img.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([input_img], max_iter=5)
run = [0]
while run[0] <= 8:

    def closure():
        with torch.no_grad():
            input_img.clamp_(0, 1)
        optimizer.zero_grad()
        f = cnn(input_img)
        style_score = 1e4 * nn.functional.mse_loss(gram_matrix(f), style_target)
        content_score = nn.functional.mse_loss(f, content_target)
        tv = (input_img[..., 1:] - input_img[..., :-1]).abs().mean()
        loss = style_score + content_score + 0.01 * tv
        loss.backward()
        run[0] += 1
        if run[0] % 4 == 0:
            print("run {}: Style Loss : {:.10f} Content Loss: {:.10f}".format(run, style_score.item(), content_score.item()))
        return loss

    optimizer.step(closure)
with torch.no_grad():
    input_img.clamp_(0, 1)
torch.save(input_img, "image.pt")
