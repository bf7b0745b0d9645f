# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with a logged metric, a validation and its checkpoint callback.

Arguments: a folder, and the number of devices.
"""

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    L.seed_everything(1)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = Regression()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(sys.argv[2]),
        max_epochs=2,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder / "checkpoints", monitor="val_loss")],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if trainer.is_global_zero:
        with (folder / "main").open("a") as file:
            file.write("rank 0\n")
    facts = {"world_size": trainer.world_size, "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
    torch.save({**facts, "state": model.state_dict()}, folder / f"rank{trainer.global_rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # without it, Gloo aborts the interpreter now and then
