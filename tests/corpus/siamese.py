# SPDX-License-Identifier: Apache-2.0
import random

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SiameseDataset(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __getitem__(self, index):
        img0, label0 = self.images[index], self.labels[index]
        should_get_same_class = random.randint(0, 1)
        while True:
            j = random.randrange(len(self.images))
            if (self.labels[j] == label0) == bool(should_get_same_class):
                break
        return img0, self.images[j], torch.tensor([float(self.labels[j] != label0)])

    def __len__(self):
        return len(self.images)


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn1 = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 4, kernel_size=3), nn.ReLU(inplace=True), nn.BatchNorm2d(4))
        self.fc1 = nn.Sequential(nn.Linear(4 * 8 * 8, 16), nn.ReLU(inplace=True), nn.Linear(16, 5))

    def forward_once(self, x):
        output = self.cnn1(x)
        output = output.view(output.size()[0], -1)
        return self.fc1(output)

    def forward(self, input1, input2):
        return self.forward_once(input1), self.forward_once(input2)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=2.0):
        super().__init__()
        self.margin = margin

    def forward(self, output1, output2, label):
        d = F.pairwise_distance(output1, output2, keepdim=True)
        return torch.mean((1 - label) * d.pow(2) + label * torch.clamp(self.margin - d, min=0.0).pow(2))


def main():
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    X, y = load_digits(n_class=4, return_X_y=True)
    images = torch.tensor(X[:60]).view(-1, 1, 8, 8) / 16
    loader = DataLoader(SiameseDataset(images, y[:60].tolist()), shuffle=True, batch_size=8)
    net = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0005)
    counter, loss_history = [], []
    it = 0
    for epoch in range(2):
        for i, (img0, img1, label) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(*net(img0, img1), label)
            loss.backward()
            optimizer.step()
            if i % 4 == 0:
                print("Epoch number {}\n Current loss {}\n".format(epoch, loss.item()))
                it += 4
                counter.append(it)
                loss_history.append(loss.item())
    net.eval()
    with torch.no_grad():
        o1, o2 = net(images[:1], images[1:2])
    print("Dissimilarity: {!r}".format(F.pairwise_distance(o1, o2).item()))


if __name__ == "__main__":
    main()
