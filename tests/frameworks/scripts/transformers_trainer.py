# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, with an evaluation and its own checkpoints. Arguments: a folder."""

import os
import sys
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

folder = Path(sys.argv[1])
set_seed(1)
config = BertConfig(
    vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
)
model = BertForSequenceClassification(config)
tokens, labels = torch.randint(0, 20, (32, 6)), torch.randint(0, 2, (32,))
data = [{"input_ids": one, "labels": label} for one, label in zip(tokens, labels, strict=True)]
arguments = TrainingArguments(
    output_dir=str(folder / "checkpoints"),
    use_cpu=True,
    per_device_train_batch_size=4,
    num_train_epochs=2,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="epoch",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
trainer.train()
metrics = {"eval_loss": trainer.evaluate()["eval_loss"]}
trainer.save_model(str(folder / "model"))
if trainer.is_world_process_zero():
    with (folder / "main").open("a") as file:
        file.write("rank 0\n")
facts = {"world_size": arguments.world_size, "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
torch.save({**facts, "state": model.state_dict()}, folder / f"rank{arguments.process_index}.pt")
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # without it, Gloo aborts the interpreter now and then
