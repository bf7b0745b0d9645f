# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import pathlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


@dataclass
class ModelOutput:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class SineDataset(Dataset):
    def __init__(self, n: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 1, generator=g) * 6 - 3
        self.y = torch.sin(self.x)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.x[i], "labels": self.y[i]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.head = nn.Linear(20, 1)

    def forward(self, input: Tensor, labels: Tensor | None = None) -> ModelOutput:
        hidden = self.body(input)
        logits = self.head(hidden)
        loss = None if labels is None else nn.functional.mse_loss(logits, labels)
        return ModelOutput(logits=logits, hidden=hidden, loss=loss)


class Callback:
    def on_epoch_end(self, trainer: Trainer) -> None: ...


class SaveBest(Callback):
    def __init__(self, folder: str) -> None:
        self.folder, self.best = pathlib.Path(folder), float("inf")

    def on_epoch_end(self, trainer: Trainer) -> None:
        value = trainer.history[-1]["val"]
        if value < self.best:
            self.best = value
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(trainer.model.state_dict(), self.folder / "best.pt")
            (self.folder / "best.json").write_text(json.dumps(trainer.history[-1]))


class StopAt(Callback):
    def __init__(self, value: float) -> None:
        self.value = value

    def on_epoch_end(self, trainer: Trainer) -> None:
        if trainer.history[-1]["val"] < self.value:
            print("reached", self.value, "at epoch", trainer.epoch)
            trainer.should_stop = True


@dataclass
class Trainer:
    model: nn.Module
    train_set: Dataset
    val_set: Dataset
    callbacks: list[Callback] = field(default_factory=list)
    max_epochs: int = 6
    should_stop: bool = False
    epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def fit(self) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        loader = DataLoader(self.train_set, batch_size=13, shuffle=True)
        while self.epoch < self.max_epochs and not self.should_stop:
            self.model.train()
            losses = [self.step(batch, optimizer) for batch in loader]
            self.history.append({"train": sum(losses) / len(losses), "val": self.validate()})
            print(f"epoch {self.epoch} {self.history[-1]}")
            for callback in self.callbacks:
                callback.on_epoch_end(self)
            self.epoch += 1

    def step(self, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
        output = self.model(**batch)
        optimizer.zero_grad()
        (output.loss + 1e-4 * output.hidden.pow(2).sum(1).mean()).backward()
        optimizer.step()
        return output.loss.item()

    @torch.no_grad()
    def validate(self) -> float:
        self.model.eval()
        out = [self.model(**b).loss.item() * len(b["input"]) for b in DataLoader(self.val_set, batch_size=10)]
        return sum(out) / len(self.val_set)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    Trainer(Model(), SineDataset(70, 1), SineDataset(25, 2), [SaveBest("exp/run0"), StopAt(0.16)]).fit()
