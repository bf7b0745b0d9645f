# SPDX-License-Identifier: Apache-2.0
"""A training of ignite in ``idist.Parallel``, with a metric over all ranks and its checkpoints. Arguments: a folder."""

import os
import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import MeanSquaredError
from ignite.utils import manual_seed
from torch.utils.data import TensorDataset


def training(local_rank, folder):
    manual_seed(1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    loader = idist.auto_dataloader(data, batch_size=8, shuffle=True)
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss, device=idist.device())
    evaluator = create_supervised_evaluator(model, {"mse": MeanSquaredError()}, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def set_epoch(engine):
        if idist.get_world_size() > 1:
            loader.sampler.set_epoch(engine.state.epoch - 1)

    saver = DiskSaver(str(folder / "checkpoints"), create_dir=True, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model, "optimizer": optimizer}, saver))
    trainer.run(loader, max_epochs=2)
    metrics = {"mse": evaluator.run(loader).metrics["mse"]}
    if idist.get_rank() == 0:
        with (folder / "main").open("a") as file:
            file.write("rank 0\n")
    plain = getattr(model, "module", model)
    facts = {"world_size": idist.get_world_size(), "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
    torch.save({**facts, "state": plain.state_dict()}, folder / f"rank{idist.get_rank()}.pt")


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, Path(sys.argv[1]))
