# SPDX-License-Identifier: Apache-2.0
"""Where is the disc? A net that goes down and up again; the loss counts the overlap over the whole batch."""
import torch
from torch import nn

torch.manual_seed(19)
torch.set_default_dtype(torch.float64)


class Discs(torch.utils.data.Dataset):
    def __init__(self, number):
        grid = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
        middle = torch.rand(number, 2, 1, 1) * 6 + 3
        self.masks = ((grid - middle).square().sum(1, keepdim=True) < 9).double()
        self.pictures = self.masks + 0.5 * torch.randn(number, 1, 12, 12)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, which):
        return {"picture": self.pictures[which], "mask": self.masks[which]}


def twice(inward, outward):
    return nn.Sequential(
        nn.Conv2d(inward, outward, 3, padding=1), nn.BatchNorm2d(outward), nn.ReLU(),
        nn.Conv2d(outward, outward, 3, padding=1), nn.BatchNorm2d(outward), nn.ReLU(),
    )


class DownAndUp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse, self.again = twice(1, 4), twice(4, 8), twice(12, 4)
        self.mark = nn.Conv2d(4, 1, 1)

    def forward(self, picture):
        fine = self.fine(picture)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        wide = nn.functional.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return self.mark(self.again(torch.cat([fine, wide], 1)))


net = DownAndUp()
optimizer = torch.optim.RMSprop(net.parameters(), lr=2e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
for epoch in range(3):
    missed = 0.0
    for batch in torch.utils.data.DataLoader(Discs(23), batch_size=5, shuffle=True):
        scores, mask = net(batch["picture"]), batch["mask"]
        share = scores.sigmoid()
        overlap = 2 * (share * mask).sum() / (share.sum() + mask.sum())
        loss = nn.functional.binary_cross_entropy_with_logits(scores, mask) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        missed += loss.item() * len(mask)
    plateau.step(missed / 23)
    print(epoch, repr(missed / 23), optimizer.param_groups[0]["lr"])
