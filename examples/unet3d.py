# SPDX-License-Identifier: Apache-2.0
"""Segment spheres in synthetic 3D volumes with MONAI's UNet (needs the extra: pip install rankwise[monai]).

rankwise run -n 2 examples/unet3d.py --volumes 8 --size 48 --crop 32 --epochs 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import CacheDataset, create_test_image_3d, list_data_collate
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    LoadImaged,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
)

import rankwise as rw


def make_volumes(folder: Path, count: int, size: int) -> None:
    """Write ``count`` pairs of image and segmentation [size, size, size] as NIfTI, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        done = folder / f"segmentation{number:03}.nii.gz"
        if done.exists():
            continue
        state = np.random.RandomState(number)
        image, segmentation = create_test_image_3d(
            size, size, size, num_objs=6, rad_max=size // 4, num_seg_classes=1, channel_dim=-1, random_state=state
        )
        for array, name in ((image, "image"), (segmentation, "segmentation")):
            target = folder / f"{name}{number:03}.nii.gz"
            partial = target.with_name(f"partial-{target.name}")
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), partial)
            partial.rename(target)


def crops(folder: Path, count: int, crop: int) -> CacheDataset:
    """Return a dataset that yields two random crops [1, crop, crop, crop] of each volume."""
    files = [
        {"image": str(folder / f"image{n:03}.nii.gz"), "label": str(folder / f"segmentation{n:03}.nii.gz")}
        for n in range(count)
    ]
    both = ["image", "label"]
    transform = Compose(
        [
            LoadImaged(both),
            EnsureChannelFirstd(both, channel_dim=-1),
            ScaleIntensityd("image"),
            RandCropByPosNegLabeld(both, "label", spatial_size=[crop] * 3, pos=1, neg=1, num_samples=2),
            RandRotate90d(both, prob=0.5, spatial_axes=[0, 2]),
        ]
    )
    return CacheDataset(files, transform, progress=False, num_workers=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("runs/unet3d-volumes"))
    parser.add_argument("--volumes", type=int, default=40)
    parser.add_argument("--size", type=int, default=128, help="edge of a volume, in voxels")
    parser.add_argument("--crop", type=int, default=96, help="edge of a training crop, in voxels")
    parser.add_argument("--global-batch-size", type=int, default=4, help="volumes per step, two crops each")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from")
    options = parser.parse_args()

    torch.manual_seed(0)
    with rw.join() as world:
        with rw.local_rank_zero_first("making volumes"):  # the others then find them made
            make_volumes(options.data, options.volumes, options.size)
        dataset = crops(options.data, options.volumes, options.crop)
        loader = rw.DataLoader(
            dataset, global_batch_size=options.global_batch_size, shuffle=True, collate_fn=list_data_collate
        )
        model = UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=1,
            channels=(16, 32, 64, 128, 256),
            strides=(2, 2, 2, 2),
            num_res_units=2,
        )
        rw.replicate(model.to(world.device))
        dice_loss = DiceLoss(sigmoid=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        checkpoints = rw.Checkpointer(options.checkpoints, keep=2) if options.checkpoints else None
        if checkpoints:
            checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        for epoch in range(loader.epoch, options.epochs):
            losses, sizes = [], []
            for batch in rw.progress(loader, desc=f"epoch {epoch + 1}", leave=False):
                loss = dice_loss(model(batch["image"]), batch["label"])
                rw.log_value("Dice loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                sizes.append(len(batch["image"]))
            rw.print(f"epoch {epoch + 1}  Dice loss {rw.mean(losses, sizes):.4f}")
            if checkpoints:
                checkpoints.save(model=model, optimizer=optimizer, loader=loader)


if __name__ == "__main__":
    main()
