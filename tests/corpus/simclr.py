# SPDX-License-Identifier: Apache-2.0
"""SimCLR on vectors: two augmented views, NT-Xent within the batch, then a linear probe."""
import logging
import sys

import torch
import torch.nn.functional as F
from torch import nn

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
log = logging.getLogger("simclr")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 20, bias=False), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 8))
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        h = self.backbone(x)
        return h, self.projector(h)


def info_nce_loss(features, n_views=2, temperature=0.5):
    bs = features.shape[0] // n_views
    labels = torch.cat([torch.arange(bs) for _ in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).double()
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    return logits / temperature, torch.zeros(logits.shape[0], dtype=torch.long)


def augment(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    means = torch.randn(3, 10) * 2
    y = torch.randint(0, 3, (66,))
    x = means[y] + torch.randn(66, 10)
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), 0.003, weight_decay=1e-4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=15, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(loader) * 3)
    criterion = nn.CrossEntropyLoss()
    n_iter = 0
    for epoch in range(3):
        for images, _ in loader:
            views = torch.cat([augment(images), augment(images)], dim=0)
            _, z = encoder(views)
            logits, labels = info_nce_loss(z)
            loss = criterion(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            n_iter += 1
        top1 = (logits.argmax(1) == labels).double().mean().item()
        log.info("Epoch: %d\tLoss: %.12g\tTop1 accuracy: %.12g\tlr %.12g", epoch, loss.item(), top1, scheduler.get_last_lr()[0])
    encoder.eval()
    with torch.no_grad():
        h, _ = encoder(x)
    probe = nn.Linear(8, 3)
    opt = torch.optim.SGD(probe.parameters(), lr=0.5)
    for _ in range(10):
        opt.zero_grad()
        loss = F.cross_entropy(probe(h), y)
        loss.backward()
        opt.step()
    log.info("probe loss %.12g accuracy %.6f after %d steps", loss.item(), (probe(h).argmax(1) == y).double().mean(), n_iter)


if __name__ == "__main__":
    main()
