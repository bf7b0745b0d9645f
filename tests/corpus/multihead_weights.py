# SPDX-License-Identifier: Apache-2.0
"""Attention weights are returned beside the output and used in the loss; sequence first, with key padding."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(17)


class Pointer(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.emb = nn.Embedding(10, d, padding_idx=0)
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d, 3, 20, dropout=0.0, batch_first=False, norm_first=True), 1, enable_nested_tensor=False
        )
        self.query = nn.Parameter(torch.randn(1, 1, d))
        self.attn = nn.MultiheadAttention(d, 1)

    def forward(self, tokens):
        pad = (tokens == 0).T
        memory = self.enc(self.emb(tokens), src_key_padding_mask=pad)
        query = self.query.expand(1, tokens.shape[1], -1)
        out, weights = self.attn(query, memory, memory, key_padding_mask=pad)
        return out.squeeze(0), weights.squeeze(1)


model = Pointer()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(8):
    n = 7 + step % 3
    tokens = torch.randint(1, 10, (6, n))
    tokens[4:, ::2] = 0
    largest = tokens.argmax(0)
    _, weights = model(tokens)
    loss = nn.functional.nll_loss(weights.clamp_min(1e-9).log(), largest)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 1:
        print(step, n, loss.item(), (weights.argmax(1) == largest).double().mean().item())
