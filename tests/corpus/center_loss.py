# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class CenterLoss(nn.Module):
    """Wen et al. 2016: the loss has parameters of its own and an optimizer of its own."""

    def __init__(self, num_classes, feat_dim):
        super().__init__()
        self.num_classes = num_classes
        self.centers = nn.Parameter(torch.randn(num_classes, feat_dim))

    def forward(self, x, labels):
        batch_size = x.size(0)
        distmat = (
            torch.pow(x, 2).sum(dim=1, keepdim=True).expand(batch_size, self.num_classes)
            + torch.pow(self.centers, 2).sum(dim=1, keepdim=True).expand(self.num_classes, batch_size).t()
        )
        distmat = distmat.addmm(x, self.centers.t(), beta=1, alpha=-2)
        mask = labels.unsqueeze(1).eq(torch.arange(self.num_classes).unsqueeze(0))
        return (distmat * mask.double()).clamp(min=1e-12, max=1e12).sum() / batch_size


class ConvNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 2), nn.PReLU())
        self.fc = nn.Linear(2, num_classes)

    def forward(self, x):
        f = self.features(x)
        return f, self.fc(f)


def main(alpha=0.5, weight_cent=0.1):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    y = torch.randint(0, 4, (58,))
    x = torch.randn(4, 8)[y] + 0.5 * torch.randn(58, 8)
    model = ConvNet(4)
    criterion_xent, criterion_cent = nn.CrossEntropyLoss(), CenterLoss(4, 2)
    optimizer_model = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=5e-4, momentum=0.9)
    optimizer_centloss = torch.optim.SGD(criterion_cent.parameters(), lr=alpha)
    for epoch in range(3):
        for data, labels in DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True):
            features, outputs = model(data)
            loss_xent = criterion_xent(outputs, labels)
            loss_cent = criterion_cent(features, labels) * weight_cent
            optimizer_model.zero_grad()
            optimizer_centloss.zero_grad()
            (loss_xent + loss_cent).backward()
            optimizer_model.step()
            for param in criterion_cent.parameters():
                param.grad.data *= 1.0 / weight_cent
            optimizer_centloss.step()
        print("==> Epoch {}/3 XentLoss {:.12g} CenterLoss {:.12g} centre 0 {}".format(
            epoch + 1, loss_xent.item(), loss_cent.item(), [round(v, 9) for v in criterion_cent.centers[0].tolist()]))


if __name__ == "__main__":
    main()
