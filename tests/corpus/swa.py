# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(18)
x = torch.randn(58, 5)
y = (x[:, :2].sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=11, shuffle=True)
model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
swa_model = AveragedModel(model)
swa_start = 2
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
for epoch in range(5):
    for input, target in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(input), target)
        loss.backward()
        optimizer.step()
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(epoch, loss.item(), optimizer.param_groups[0]["lr"], swa_model.n_averaged.item())
update_bn(loader, swa_model)
swa_model.eval()
model.eval()
with torch.no_grad():
    for name, m in ("last", model), ("swa", swa_model):
        print(name, nn.functional.cross_entropy(m(x), y).item(), (m(x).argmax(1) == y).double().mean().item())
torch.save(swa_model.state_dict(), "swa.pt")
