# SPDX-License-Identifier: Apache-2.0
"""The loop with Ray Train. ``train`` runs in one process here: Ray starts the ranks."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

if TYPE_CHECKING:
    import torch

    from peer_loops import MakeOptimizer, Serve, Step


def prepare(model: torch.nn.Module, make_optimizer: MakeOptimizer) -> Step:
    model = prepare_model(model)
    optimizer = make_optimizer(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(serve: Serve) -> None:
    folder = tempfile.gettempdir()
    ray.init(num_cpus=2, object_store_memory=10**8, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    TorchTrainer(
        lambda: serve(get_context().get_world_rank(), prepare),
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()
