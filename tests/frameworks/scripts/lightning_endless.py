# SPDX-License-Identifier: Apache-2.0
"""A training by Lightning that ends by Ctrl-C, or by an error on rank 1. Arguments: ``endless``, or ``failing``."""

import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Endless(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if sys.argv[1] == "failing" and self.global_rank == 1 and self.global_step == 3:
            message = "the fourth batch is bad"
            raise ValueError(message)
        return self.layer(batch[0]).square().mean()

    def on_train_epoch_end(self):
        print("an epoch is over", flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    max_epochs=-1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Endless(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
