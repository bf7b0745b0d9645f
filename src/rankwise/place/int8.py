# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers in 8 bits, for inference, by torchao. Imported by place."""

from __future__ import annotations

import importlib
import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.torch_private.tree import LOGGER as TREE_LOGGER

if TYPE_CHECKING:
    from collections.abc import Generator

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantisable(model: nn.Module) -> set[int]:
    """Return the ``id`` of each weight that becomes 8 bits: weights of linear layers only.

    Raises:
        ConfigurationError: torchao is not installed, or does not support the dtype of the model.
    """
    _torchao()
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    wrong = {module.weight.dtype for module in linear} - set(_DTYPES)
    if wrong:
        raise ConfigurationError(
            f"int8=True requires a model in float32, bfloat16 or float16, not {', '.join(map(str, wrong))}.",
            do="convert the model first: model.bfloat16()",
        )
    others = {
        id(tensor)
        for module in model.modules()
        for name, tensor in module.named_parameters(recurse=False)
        if not (type(module) is nn.Linear and name == "weight")
    }
    return {id(module.weight) for module in linear} - others


def bytes_of_quantised(weight: torch.Tensor) -> int:
    """Return the memory of a weight [out, in] in 8 bits, with a scale and a zero point per row."""
    return weight.numel() + weight.shape[0] * (weight.element_size() + 1)


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] in 8 bits, which a linear layer can use.

    Source: torchao.quantization.quantize_ with Int8WeightOnlyConfig: symmetric, one scale per row.
    """
    torchao = _torchao()
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with _quiet():
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    return layer.weight.detach()


def parts_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors that a weight in 8 bits consists of."""
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(weight, name) for name in names}


def with_parts(weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the same weight with other tensors as its parts."""
    _, rest = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(weight).__tensor_unflatten__(parts, rest, weight.shape, weight.stride())  # type: ignore[attr-defined]
    return made


def _torchao() -> Any:
    try:
        with _quiet():
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ConfigurationError(
            "int8=True needs torchao, which is not installed.", do="pip install 'rankwise[int8]'"
        ) from error


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the messages of torchao's import about kernels of other machines."""
    loggers = [logging.getLogger(name) for name in ("torchao", TREE_LOGGER)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
