# SPDX-License-Identifier: Apache-2.0
"""The models of the tests of random numbers: each draws as some public script does. All take [batch, 6, 8]."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributions import Normal
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]
    """Of a model with linear layers ``a`` [8, 8], ``b`` [8, 8], and inputs [batch, 6, 8]; returns [batch, ...]."""

LENGTH = 6
WIDTH = 8


class Drawing(nn.Module):
    """Linear layers around something that draws."""

    def __init__(self, forward: Forward, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.layer = layer or nn.Identity()
        self.b = nn.Linear(WIDTH, WIDTH)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def _within(draw: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Drawing(lambda m, x: m.b(draw(torch.tanh(m.a(x)))))


def _through(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = m.layer(torch.tanh(m.a(x)))
        return m.b(out[0] if isinstance(out, tuple) else out)

    return lambda: Drawing(forward, make())


def _sequence_first(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        out = m.layer(torch.tanh(m.a(x)).transpose(0, 1).contiguous())
        return m.b((out[0] if isinstance(out, tuple) else out).transpose(0, 1))

    return lambda: Drawing(forward, make())


class _Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=True)[0]


class _Decoder(nn.TransformerDecoderLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x.flip(1))


def _encoder(*, batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=batch_first)


def _flat_time_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    flat = torch.tanh(m.a(x)).transpose(0, 1).reshape(-1, WIDTH)
    return m.b(functional.dropout(flat, 0.4).view(LENGTH, -1, WIDTH).transpose(0, 1))


def _flat_batch_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(functional.dropout(torch.tanh(m.a(x)).reshape(-1, WIDTH), 0.4).view(x.shape))


def _noisy_weights(m: Any, x: torch.Tensor) -> torch.Tensor:
    weight = m.a.weight * (1 + 0.3 * torch.randn_like(m.a.weight))
    return m.b(torch.tanh(functional.linear(x, weight)))


def _noise_of_the_share_s_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    # As many rows as a layer has, and as the ranks' samples in some batches.
    scale = torch.randn(WIDTH, WIDTH, dtype=x.dtype, device=x.device)
    return m.b(torch.tanh(functional.linear(x, m.a.weight * scale)))


def _vae(m: Any, x: torch.Tensor) -> torch.Tensor:
    mean, log_variance = m.a(x), m.layer(x)
    return m.b(mean + torch.randn_like(log_variance) * (0.5 * log_variance).exp())


def _sized_noise(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x) + 0.1 * torch.randn(x.size(0), x.size(1), WIDTH, dtype=x.dtype, device=x.device))


def _rsample(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.b(Normal(m.a(x), functional.softplus(m.layer(x)) + 0.1).rsample())


def _drop_path(m: Any, x: torch.Tensor) -> torch.Tensor:
    keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.6)
    return m.b(x + torch.tanh(m.a(x)) * keep / 0.6)


def _checkpointed(m: Any, x: torch.Tensor) -> torch.Tensor:
    def inner(h: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(m.a(h)), 0.4)

    return m.b(checkpoint(inner, x, use_reentrant=False))


def _multinomial(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(m.a(x[:, 0]))
    picked = torch.multinomial(h.softmax(-1), 2)
    return m.b(h * functional.one_hot(picked, WIDTH).sum(1))


def _of_probabilities(h: torch.Tensor) -> torch.Tensor:
    return h * torch.bernoulli(h.detach().sigmoid())


def _convolution(m: Any, x: torch.Tensor) -> torch.Tensor:
    image = torch.tanh(m.a(x)).unsqueeze(1).expand(-1, 3, -1, -1).to(memory_format=torch.channels_last)
    return m.b(functional.dropout2d(image, 0.4).mean(1))


def _twice_the_batch(m: Any, x: torch.Tensor) -> torch.Tensor:
    both = torch.cat([torch.tanh(m.a(x)), m.a(-x)])
    first, second = functional.dropout(both, 0.4).chunk(2)
    return m.b(first + second)


class _Dropped(nn.Module):
    """Dropout of the outputs of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x)[0], 0.4)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "dropout": _within(lambda h: functional.dropout(h, 0.4)),
    "dropout1d": _within(lambda h: functional.dropout1d(h, 0.4)),
    "alpha_dropout": _within(lambda h: functional.alpha_dropout(h, 0.3, training=True)),
    "feature_alpha_dropout": _within(lambda h: functional.feature_alpha_dropout(h, 0.3, training=True)),
    "dropout2d, channels last": lambda: Drawing(_convolution),
    "dropout3d": _within(lambda h: functional.dropout3d(h.view(-1, 2, 3, 2, 4), 0.4).view(h.shape)),
    "rrelu": _within(lambda h: functional.rrelu(h, training=True)),
    "gumbel_softmax": _within(lambda h: functional.gumbel_softmax(h, tau=0.7)),
    "rand_like": _within(lambda h: h + torch.rand_like(h)),
    "randn_like of a transpose": _within(lambda h: h + torch.randn_like(h.transpose(0, 2)).transpose(0, 2)),
    "randint_like": _within(lambda h: h + torch.randint_like(h, 5)),
    "poisson": _within(lambda h: h * torch.poisson(h.detach().abs() * 3)),
    "bernoulli of probabilities": _within(_of_probabilities),
    "multinomial": lambda: Drawing(_multinomial),
    "VAE": lambda: Drawing(_vae, nn.Linear(WIDTH, WIDTH)),
    "Normal.rsample": lambda: Drawing(_rsample, nn.Linear(WIDTH, WIDTH)),
    "randn of sizes": lambda: Drawing(_sized_noise),
    "dropout of a mask on a device": _within(lambda h: h * functional.dropout((h > 0).to(h.device, h.dtype), 0.4)),
    "drop path": lambda: Drawing(_drop_path),
    "noise on weights": lambda: Drawing(_noisy_weights),
    "noise of sizes on weights": lambda: Drawing(_noise_of_the_share_s_size),
    "samples and time in one dim": lambda: Drawing(_flat_batch_first),
    "time and samples in one dim": lambda: Drawing(_flat_time_first),
    "twice the batch": lambda: Drawing(_twice_the_batch),
    "checkpoint": lambda: Drawing(_checkpointed),
    "encoder": _through(_encoder(batch_first=True)),
    "encoder, sequence first": _sequence_first(_encoder(batch_first=False)),
    "decoder": _through(lambda: _Decoder(WIDTH, 2, 16, dropout=0.3, batch_first=True)),
    "attention with weights": _through(lambda: _Attention(WIDTH, 2, dropout=0.3, batch_first=True)),
    "LSTM": _through(lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True)),
    "LSTM of as many layers as samples": _through(lambda: nn.LSTM(WIDTH, WIDTH, 4, dropout=0.4, batch_first=True)),
    "dropout after a GRU": _through(lambda: _Dropped(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "GRU, sequence first": _sequence_first(lambda: nn.GRU(WIDTH, WIDTH, 2, dropout=0.4)),
}
