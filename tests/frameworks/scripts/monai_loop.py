# SPDX-License-Identifier: Apache-2.0
"""A loop as MONAI's tutorials of distributed training have it: a segmentation, with a metric. Arguments: a folder."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from monai.data import CacheDataset, DataLoader, partition_dataset
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import Compose, RandRotate90d, ScaleIntensityd
from monai.utils import set_determinism
from torch.nn.parallel import DistributedDataParallel

folder = Path(sys.argv[1])
dist.init_process_group(backend="gloo", init_method="env://")
set_determinism(seed=1)
volumes = [{"image": torch.rand(1, 16, 16), "mask": (torch.rand(1, 16, 16) > 0.5).float()} for _ in range(8)]
mine = partition_dataset(
    volumes, num_partitions=dist.get_world_size(), shuffle=True, seed=0, drop_last=False, even_divisible=True
)[dist.get_rank()]
transforms = Compose([ScaleIntensityd("image"), RandRotate90d(["image", "mask"], prob=0.5)])
loader = DataLoader(CacheDataset(mine, transforms, num_workers=0, progress=False), batch_size=2, shuffle=True)

net = UNet(spatial_dims=2, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,), norm="instance")
model = DistributedDataParallel(net)
loss_function = DiceLoss(sigmoid=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(2):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss_function(model(batch["image"]), batch["mask"]).backward()
        optimizer.step()

dice = DiceMetric(include_background=True, reduction="mean")
model.eval()
with torch.no_grad():
    for batch in loader:
        dice((sliding_window_inference(batch["image"], (8, 8), 4, net) > 0).float(), batch["mask"])
metrics = {"dice": float(dice.aggregate())}
if dist.get_rank() == 0:
    torch.save(net.state_dict(), folder / "model.pth")
    with (folder / "main").open("a") as file:
        file.write("rank 0\n")
facts = {"world_size": dist.get_world_size(), "variable": os.environ.get("WORLD_SIZE"), "metrics": metrics}
torch.save({**facts, "state": net.state_dict()}, folder / f"rank{dist.get_rank()}.pt")
# DistributedDataParallel holds the interpreter's lock while it waits for Gloo's threads, and such a thread needs the
# lock to let go of the last tensor it sent: freed after the group, it now and then hangs or aborts at the end.
del model
dist.destroy_process_group()
