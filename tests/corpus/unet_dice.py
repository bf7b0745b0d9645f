# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Circles(Dataset):
    def __init__(self, count, size=12, seed=0):
        rng = np.random.RandomState(seed)
        self.x, self.y = [], []
        yy, xx = np.mgrid[:size, :size]
        for _ in range(count):
            cy, cx, r = rng.uniform(3, size - 3, 2).tolist() + [rng.uniform(2, 5)]
            mask = ((yy - cy) ** 2 + (xx - cx) ** 2 < r**2).astype(np.float64)
            self.x.append((mask + rng.normal(0, 0.4, mask.shape))[None])
            self.y.append(mask[None])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        return {"image": torch.as_tensor(self.x[idx]), "mask": torch.as_tensor(self.y[idx])}


class DoubleConv(nn.Module):
    """(convolution => [BN] => ReLU) * 2"""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, base=3):
        super().__init__()
        self.inc = DoubleConv(1, base)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(base, base * 2))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(base * 2, base * 4))
        self.up1 = nn.ConvTranspose2d(base * 4, base * 2, 2, stride=2)
        self.conv1 = DoubleConv(base * 4, base * 2)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2 = DoubleConv(base * 3, base)
        self.outc = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def dice_loss(pred, target, smooth=1.0):
    # over the whole batch, not per image
    pred = torch.sigmoid(pred).contiguous().view(-1)
    target = target.contiguous().view(-1)
    intersection = (pred * target).sum()
    return 1 - (2.0 * intersection + smooth) / (pred.sum() + target.sum() + smooth)


@torch.inference_mode()
def evaluate(net, dataloader):
    net.eval()
    inter, union = 0, 0
    for batch in dataloader:
        pred = (torch.sigmoid(net(batch["image"])) > 0.5).double()
        inter += (pred * batch["mask"]).sum().item()
        union += ((pred + batch["mask"]) > 0).sum().item()
    net.train()
    return inter / max(union, 1)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(42)
    net = UNet()
    print(f"{sum(p.numel() for p in net.parameters() if p.requires_grad)} parameters")
    train_loader = DataLoader(Circles(13), batch_size=5, shuffle=True)
    val_loader = DataLoader(Circles(8, seed=1), batch_size=4, drop_last=True)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
    for epoch in range(1, 3):
        epoch_loss = 0
        for batch in train_loader:
            masks_pred = net(batch["image"])
            loss = F.binary_cross_entropy_with_logits(masks_pred, batch["mask"]) + dice_loss(masks_pred, batch["mask"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()
        iou = evaluate(net, val_loader)
        scheduler.step(iou)
        print(f"epoch {epoch} loss {epoch_loss / len(train_loader):.12g} IoU {iou:.12g} lr {optimizer.param_groups[0]['lr']}")
    torch.save(net.state_dict(), "checkpoint_epoch2.pth")
