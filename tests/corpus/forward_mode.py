# SPDX-License-Identifier: Apache-2.0
"""Directional derivatives of a network in forward mode."""
import torch
import torch.autograd.forward_ad as fwAD

torch.set_default_dtype(torch.float64)
torch.manual_seed(26)
encoder = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Sigmoid())
for step in range(4):
    x = torch.randn(8, 5)
    with fwAD.dual_level():
        out = fwAD.unpack_dual(encoder(fwAD.make_dual(x, torch.ones_like(x))))
        print(step, out.tangent.sum().item())
    print(encoder(x).sum().item())
