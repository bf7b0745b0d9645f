# SPDX-License-Identifier: Apache-2.0
"""A Jacobian, a Hessian and rows of gradients that torch computes at once, by vmap over the backward pass."""
import torch
from torch.autograd.functional import hessian, jacobian

torch.set_default_dtype(torch.float64)
torch.manual_seed(26)
encoder = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Sigmoid())
for step in range(4):
    x = torch.randn(8, 5)
    print(step, jacobian(encoder, x, vectorize=True).pow(2).sum().item())
    print(jacobian(encoder, x, vectorize=True, strategy="forward-mode").pow(2).sum().item())
    print(hessian(lambda inputs: encoder(inputs).pow(2).sum(), x[:3], vectorize=True).sum().item())
    x.requires_grad_()
    directions = torch.randn(3, 8, 4)
    weight = encoder[0].weight
    found = torch.autograd.grad(encoder(x), (x, weight), directions, is_grads_batched=True)
    print(*(one.pow(2).sum().item() for one in found))
