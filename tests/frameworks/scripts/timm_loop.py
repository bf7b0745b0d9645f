# SPDX-License-Identifier: Apache-2.0
"""A loop as timm's training script has it, with timm's own helpers for several ranks. Arguments: a folder."""

import argparse
import os
from pathlib import Path

import timm
import torch
from timm import utils
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--device", default="cpu")
parser.add_argument("--model", default="test_resnet")
args = parser.parse_args()
device = utils.init_distributed_device(args)
utils.random_seed(1, 0)
data = TensorDataset(torch.rand(16, 3, 32, 32), torch.randint(0, 3, (16,)))
plain = timm.create_model(args.model, num_classes=3).to(device)
utils.random_seed(1, args.rank)
optimizer = create_optimizer_v2(plain, opt="sgd", lr=0.1, momentum=0.9)
ema = utils.ModelEmaV3(plain, decay=0.9)
model = DistributedDataParallel(plain) if args.distributed else plain
sampler = DistributedSampler(data) if args.distributed else None
loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
scheduler = CosineLRScheduler(optimizer, t_initial=2)
meter = utils.AverageMeter()
for epoch in range(2):
    if sampler is not None:
        sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        ema.update(plain)
        shared = utils.reduce_tensor(loss.data, args.world_size) if args.distributed else loss.data
        meter.update(shared.item(), len(x))
    if args.distributed:
        utils.distribute_bn(model, args.world_size, reduce=True)
        utils.distribute_bn(ema, args.world_size, reduce=True)
    scheduler.step(epoch + 1)
if utils.is_primary(args):
    utils.CheckpointSaver(model, optimizer, args, checkpoint_dir=str(args.folder)).save_checkpoint(1)
    with (args.folder / "main").open("a") as file:
        file.write("rank 0\n")
facts = {"world_size": args.world_size, "variable": os.environ.get("WORLD_SIZE"), "metrics": {"loss": meter.avg}}
torch.save({**facts, "state": plain.state_dict()}, args.folder / f"rank{args.rank}.pt")
# Freed after the group, torch's DistributedDataParallel may hang or abort (see monai_loop.py).
del model
if args.distributed:
    torch.distributed.destroy_process_group()
