# SPDX-License-Identifier: Apache-2.0
#!/usr/bin/env python
# A CIFAR-like ResNet, heavily reduced. python tiny_resnet.py --depth 8
import argparse
import os
import shutil

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.data

parser = argparse.ArgumentParser(description="ResNet")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=10, type=int)
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float)
parser.add_argument("--print-freq", "-p", default=2, type=int)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("--save-dir", default="save_temp", type=str)
best_prec1 = 0


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_blocks, num_classes=4):
        super().__init__()
        self.in_planes = 4
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = self._make_layer(4, num_blocks[0], 1)
        self.layer2 = self._make_layer(8, num_blocks[1], 2)
        self.linear = nn.Linear(8, num_classes)

    def _make_layer(self, planes, num_blocks, stride):
        layers = []
        for s in [stride] + [1] * (num_blocks - 1):
            layers.append(BasicBlock(self.in_planes, planes, s))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer2(self.layer1(out))
        out = F.avg_pool2d(out, out.size()[3])
        return self.linear(out.view(out.size(0), -1))


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target, topk=(1,)):
    maxk = max(topk)
    batch_size = target.size(0)
    _, pred = output.topk(maxk, 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    return [correct[:k].reshape(-1).double().sum(0).mul_(100.0 / batch_size) for k in topk]


def make_set(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 3, 8, 8, generator=g)
    x[torch.arange(n), y % 3] += 1.5 * (y > 1).double().view(-1, 1, 1) + 0.5
    return torch.utils.data.TensorDataset(x, y)


def train(train_loader, model, criterion, optimizer, epoch, args):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    for i, (input, target) in enumerate(train_loader):
        output = model(input)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        prec1, prec2 = accuracy(output.data, target, (1, 2))
        losses.update(loss.item(), input.size(0))
        top1.update(prec1.item(), input.size(0))
        if i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}/{len(train_loader)}]\tLoss {losses.val:.12g} ({losses.avg:.12g})\t"
                f"Prec@1 {top1.val:.3f} ({top1.avg:.3f}) Prec@2 {prec2:.3f}"
            )


@torch.no_grad()
def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    for input, target in val_loader:
        output = model(input)
        losses.update(criterion(output, target).item(), input.size(0))
        top1.update(accuracy(output, target)[0].item(), input.size(0))
    print(f" * Loss {losses.avg:.12g} Prec@1 {top1.avg:.3f}")
    return top1.avg


def save_checkpoint(state, is_best, filename):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(os.path.dirname(filename), "model_best.pth.tar"))


def main():
    global best_prec1
    args = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    if not os.path.exists(args.save_dir):
        os.makedirs(args.save_dir)
    model = ResNet([1, 1])
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1], gamma=0.1)
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    train_loader = torch.utils.data.DataLoader(make_set(53, 1), batch_size=args.batch_size, shuffle=True)
    val_loader = torch.utils.data.DataLoader(make_set(23, 2), batch_size=9)
    for epoch in range(start_epoch, args.epochs):
        print("current lr {:.5e}".format(optimizer.param_groups[0]["lr"]))
        train(train_loader, model, criterion, optimizer, epoch, args)
        scheduler.step()
        prec1 = validate(val_loader, model, criterion)
        is_best = prec1 > best_prec1
        best_prec1 = max(prec1, best_prec1)
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_prec1": best_prec1,
                "optimizer": optimizer.state_dict(),
            },
            is_best,
            filename=os.path.join(args.save_dir, "checkpoint.th"),
        )


if __name__ == "__main__":
    main()
