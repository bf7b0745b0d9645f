# SPDX-License-Identifier: Apache-2.0
"""The classifier of PyTorch's 60-minute blitz, on drawn images."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
classes = ("plane", "car", "bird", "cat")
batch_size = 4


def draw(n):
    labels = torch.randint(0, 4, (n,))
    images = torch.randn(n, 3, 16, 16) * 0.3
    for i, c in enumerate(labels.tolist()):
        images[i, c % 3, (c // 2) * 8 : (c // 2) * 8 + 8] += 1
    return torch.utils.data.TensorDataset(images, labels)


trainloader = torch.utils.data.DataLoader(draw(42), batch_size=batch_size, shuffle=True, num_workers=0)
testset = draw(18)
testloader = torch.utils.data.DataLoader(testset, batch_size=batch_size, shuffle=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(6 * 2 * 2, 20)
        self.fc3 = nn.Linear(20, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)  # flatten all dimensions except batch
        x = F.relu(self.fc1(x))
        return self.fc3(x)


net = Net()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
for epoch in range(2):  # loop over the dataset multiple times
    running_loss = 0.0
    for i, data in enumerate(trainloader, 0):
        inputs, labels = data
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        if i % 5 == 4:  # print every 5 mini-batches
            print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 5:.12f}")
            running_loss = 0.0
print("Finished Training")
PATH = "./cifar_net.pth"
torch.save(net.state_dict(), PATH)

net = Net()
net.load_state_dict(torch.load(PATH, weights_only=True))
correct_pred = {classname: 0 for classname in classes}
total_pred = {classname: 0 for classname in classes}
with torch.no_grad():
    for images, labels in testloader:
        outputs = net(images)
        _, predictions = torch.max(outputs, 1)
        for label, prediction in zip(labels, predictions):
            if label == prediction:
                correct_pred[classes[label]] += 1
            total_pred[classes[label]] += 1
for classname, correct_count in correct_pred.items():
    print(f"Accuracy for class: {classname:5s} is {100 * float(correct_count) / total_pred[classname]:.1f} %")
