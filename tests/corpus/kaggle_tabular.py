# SPDX-License-Identifier: Apache-2.0
import gc
import os
import random
import warnings

import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")


class CFG:
    seed = 42
    n_fold = 2
    epochs = 2
    train_bs = 24
    valid_bs = 50
    lr = 1e-2
    emb = 3


def seed_torch(seed=42):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True


seed_torch(CFG.seed)
torch.set_default_dtype(torch.float64)
cat = np.random.randint(0, 6, (110, 2))
cont = np.random.randn(110, 4)
target = ((cont[:, 0] + (cat[:, 0] > 2) - 0.5 + 0.3 * np.random.randn(110)) > 0).astype(float)
test_cat, test_cont = np.random.randint(0, 6, (30, 2)), np.random.randn(30, 4)


class TrainDataset(Dataset):
    def __init__(self, cat, cont, y=None):
        self.cat, self.cont, self.y = cat, cont, y

    def __len__(self):
        return len(self.cat)

    def __getitem__(self, idx):
        c, x = torch.LongTensor(self.cat[idx]), torch.tensor(self.cont[idx])
        return (c, x) if self.y is None else (c, x, torch.tensor(self.y[idx]))


class TabularNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(6, CFG.emb) for _ in range(2)])
        self.bn = nn.BatchNorm1d(4)
        self.mlp = nn.Sequential(nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))

    def forward(self, cat, cont):
        x = torch.cat([e(cat[:, i]) for i, e in enumerate(self.emb)] + [self.bn(cont)], 1)
        return self.mlp(x).squeeze(1)


def train_fn(loader, model, criterion, optimizer, scheduler):
    model.train()
    total, count = 0.0, 0
    for c, x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(c, x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item() * y.size(0)
        count += y.size(0)
    return total / count


def inference_fn(loader, model):
    model.eval()
    preds = []
    for batch in loader:
        with torch.no_grad():
            preds.append(model(batch[0], batch[1]).sigmoid().numpy())
    return np.concatenate(preds)


oof, predictions = np.zeros(len(target)), np.zeros(len(test_cat))
for fold, (trn, val) in enumerate(KFold(CFG.n_fold, shuffle=True, random_state=CFG.seed).split(cat)):
    print(f"========== fold: {fold} training ==========")
    train_loader = DataLoader(TrainDataset(cat[trn], cont[trn], target[trn]), CFG.train_bs, shuffle=True, drop_last=True)
    valid_loader = DataLoader(TrainDataset(cat[val], cont[val], target[val]), CFG.valid_bs)
    model = TabularNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG.lr, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, eta_min=1e-4)
    best_score = 0.0
    for epoch in range(CFG.epochs):
        avg_loss = train_fn(train_loader, model, nn.BCEWithLogitsLoss(), optimizer, scheduler)
        preds = inference_fn(valid_loader, model)
        score = roc_auc_score(target[val], preds)
        print(f"Epoch {epoch + 1} - avg_train_loss: {avg_loss:.10f} - AUC: {score:.10f}")
        if score > best_score:
            best_score = score
            print(f"Epoch {epoch + 1} - Save Best Score: {best_score:.4f} Model")
            torch.save({"model": model.state_dict(), "preds": preds}, f"fold{fold}_best.pth")
    state = torch.load(f"fold{fold}_best.pth", weights_only=False)
    model.load_state_dict(state["model"])
    oof[val] = state["preds"]
    predictions += inference_fn(DataLoader(TrainDataset(test_cat, test_cont), CFG.valid_bs), model) / CFG.n_fold
    del model, optimizer
    gc.collect()
print(f"CV: {roc_auc_score(target, oof):.10f}")
with open("submission.csv", "w") as f:
    f.write("id,target\n")
    for i, p in enumerate(predictions):
        f.write(f"{i},{p:.12f}\n")
