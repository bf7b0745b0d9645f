# SPDX-License-Identifier: Apache-2.0
"""Models for the tests of tensor parallelism: written by hand, torch's own, and one of transformers."""

from __future__ import annotations

import torch
from torch import nn

NUM_WORDS = 13
WIDTH = 12


class Attention(nn.Module):
    """Counts its heads with an attribute of its own, as many written by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (one(x).view(b, t, self.n_head, -1).transpose(1, 2) for one in (self.wq, self.wk, self.wv))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class GptBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 20), "fc2": nn.Linear(20, WIDTH)})
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x)) * self.scale
        return x + self.mlp["fc2"](torch.nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class Gpt(nn.Module):
    """A tied embedding and head, whose words do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(NUM_WORDS, WIDTH)
        self.wpe = nn.Parameter(torch.randn(5, WIDTH) * 0.1)
        self.layers = nn.ModuleList([GptBlock() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x) + self.wpe
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(NUM_WORDS, WIDTH)
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.SiLU(), nn.Linear(6, WIDTH)), nn.Linear(WIDTH, NUM_WORDS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.first(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 3, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(x)))


def llama() -> nn.Module:
    """Two layers, grouped keys and values, an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=NUM_WORDS,
            hidden_size=16,
            intermediate_size=22,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
        )
    )
