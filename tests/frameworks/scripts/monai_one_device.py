# SPDX-License-Identifier: Apache-2.0
"""A segmentation in three dimensions as MONAI has it: random transforms, workers, sliding windows, the best model."""

import torch
from monai.data import CacheDataset, DataLoader, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    RandCropByPosNegLabeld,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

torch.set_default_dtype(torch.float64)
set_determinism(seed=3)
volumes = []
for _ in range(7):
    image = torch.rand(1, 20, 20, 20)
    volumes.append({"image": image, "label": (image > 0.6).double()})
keys = ["image", "label"]
augment = Compose(
    [
        ScaleIntensityd("image"),
        RandCropByPosNegLabeld(keys, label_key="label", spatial_size=(16, 16, 16), pos=1, neg=1, num_samples=2),
        RandFlipd(keys, prob=0.5, spatial_axis=0),
        RandRotate90d(keys, prob=0.5),
        RandGaussianNoised("image", prob=0.5),
    ]
)
cached = CacheDataset(volumes[:5], augment, num_workers=0, progress=False)
train = DataLoader(cached, batch_size=2, shuffle=True, num_workers=1, collate_fn=list_data_collate)
valid = DataLoader(CacheDataset(volumes[5:], ScaleIntensityd("image"), num_workers=0, progress=False), batch_size=1)
net = UNet(3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="instance", dropout=0.1).double()
loss_function = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
metric = DiceMetric(include_background=False, reduction="mean")
best = -1.0
for epoch in range(3):
    net.train()
    total = 0.0
    for batch in train:
        inputs, labels = batch["image"].double(), batch["label"]
        optimizer.zero_grad()
        loss = loss_function(net(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, total / len(train))
    net.eval()
    with torch.no_grad():
        for batch in valid:
            found = sliding_window_inference(batch["image"].double(), (16, 16, 16), 4, net)
            found = [AsDiscrete(argmax=True, to_onehot=2)(one) for one in decollate_batch(found)]
            truth = [AsDiscrete(to_onehot=2)(one) for one in decollate_batch(batch["label"])]
            metric(found, truth)
    value = float(metric.aggregate())
    metric.reset()
    if value > best:
        best = value
        torch.save(net.state_dict(), "best.pt")
    print(epoch, value, best)
