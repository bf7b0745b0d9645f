# SPDX-License-Identifier: Apache-2.0
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)


class DeepNN(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(30, num_classes))

    def forward(self, x):
        return self.classifier(self.features(x))


class LightNN(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 10), nn.ReLU(), nn.Linear(10, num_classes))

    def forward(self, x):
        return self.net(x)


centres = torch.randn(5, 9)
y = torch.randint(5, (120,))
x = centres[y] + 0.7 * torch.randn(120, 9)
train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:90], y[:90]), batch_size=25, shuffle=True)
test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[90:], y[90:]), batch_size=25)


def train(model, train_loader, epochs, learning_rate):
    optimizer = optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader)}")


def train_knowledge_distillation(teacher, student, train_loader, epochs, learning_rate, T, soft_w, ce_w):
    optimizer = optim.Adam(student.parameters(), lr=learning_rate)
    teacher.eval()
    student.train()
    for epoch in range(epochs):
        running_loss = 0.0
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = torch.sum(soft_targets * (soft_targets.log() - soft_prob)) / soft_prob.size()[0] * (T**2)
            loss = soft_w * soft_loss + ce_w * F.cross_entropy(student_logits, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        print(f"Epoch {epoch + 1}/{epochs}, Loss: {running_loss / len(train_loader)}")


def test(model, test_loader):
    model.eval()
    correct = sum((model(i).argmax(1) == l).sum().item() for i, l in test_loader)  # noqa: E741
    print(f"Test Accuracy: {100 * correct / len(test_loader.dataset):.2f}%")


nn_deep, nn_light = DeepNN(), LightNN()
print("Norm of 1st layer:", torch.norm(nn_light.net[0].weight).item())
train(nn_deep, train_loader, epochs=3, learning_rate=0.01)
test(nn_deep, test_loader)
train_knowledge_distillation(nn_deep, nn_light, train_loader, 2, 0.01, T=2, soft_w=0.25, ce_w=0.75)
test(nn_light, test_loader)
