# SPDX-License-Identifier: Apache-2.0
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

EPOCHS = 3
BATCH = 13


class Stripes(Dataset):
    """Images with horizontal, vertical or diagonal stripes, with noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        self.labels = torch.randint(0, 3, (n,), generator=g)
        waves = torch.stack([torch.sin(yy), torch.sin(xx), torch.sin(yy + xx)])
        self.images = waves[self.labels].unsqueeze(1) + 0.5 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self, num_classes=3):
        super(ConvNet, self).__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(6, 8, kernel_size=3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2)
        )
        self.fc = nn.Linear(3 * 3 * 8, num_classes)

    def forward(self, x):
        out = self.layer1(x)
        out = self.layer2(out)
        out = out.reshape(out.size(0), -1)
        return self.fc(out)


dataloaders = {
    "train": DataLoader(Stripes(75, 1), batch_size=BATCH, shuffle=True),
    "val": DataLoader(Stripes(40, 2), batch_size=BATCH),
}
dataset_sizes = {k: len(v.dataset) for k, v in dataloaders.items()}
device = "cuda:0" if torch.cuda.is_available() else "cpu"
model = ConvNet().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

best_acc = 0.0
best_wts = copy.deepcopy(model.state_dict())
for epoch in range(EPOCHS):
    print(f"Epoch {epoch}/{EPOCHS - 1}")
    for phase in ["train", "val"]:
        if phase == "train":
            model.train()
        else:
            model.eval()
        running_loss = 0.0
        running_corrects = 0
        for inputs, labels in dataloaders[phase]:
            inputs = inputs.to(device)
            labels = labels.to(device)
            optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                outputs = model(inputs)
                _, preds = torch.max(outputs, 1)
                loss = criterion(outputs, labels)
                if phase == "train":
                    loss.backward()
                    optimizer.step()
            running_loss += loss.item() * inputs.size(0)
            running_corrects += torch.sum(preds == labels.data)
        epoch_loss = running_loss / dataset_sizes[phase]
        epoch_acc = running_corrects.double() / dataset_sizes[phase]
        print(f"{phase} Loss: {epoch_loss:.12g} Acc: {epoch_acc:.12g}")
        if phase == "val" and epoch_acc > best_acc:
            best_acc = epoch_acc
            best_wts = copy.deepcopy(model.state_dict())
            torch.save(best_wts, "best_model.pt")

print(f"Best val Acc: {best_acc:.12g}")
model.load_state_dict(best_wts)
model.eval()
with torch.no_grad():
    print("sum of logits of the best model:", repr(model(dataloaders["val"].dataset.images).sum().item()))
