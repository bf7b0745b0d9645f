# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    """Early stops the training if validation loss doesn't improve after a given patience."""

    def __init__(self, patience=7, verbose=False, delta=0, path="checkpoint.pt", trace_func=print):
        self.patience = patience
        self.verbose = verbose
        self.counter = 0
        self.best_score = None
        self.early_stop = False
        self.val_loss_min = np.inf
        self.delta = delta
        self.path = path
        self.trace_func = trace_func

    def __call__(self, val_loss, model):
        score = -val_loss
        if self.best_score is None:
            self.best_score = score
            self.save_checkpoint(val_loss, model)
        elif score < self.best_score + self.delta:
            self.counter += 1
            self.trace_func(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            if self.counter >= self.patience:
                self.early_stop = True
        else:
            self.best_score = score
            self.save_checkpoint(val_loss, model)
            self.counter = 0

    def save_checkpoint(self, val_loss, model):
        if self.verbose:
            self.trace_func(f"Validation loss decreased ({self.val_loss_min:.10f} --> {val_loss:.10f}).  Saving model ...")
        torch.save(model.state_dict(), self.path)
        self.val_loss_min = val_loss


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    X, y = load_diabetes(return_X_y=True)
    X, y = torch.tensor(X) * 20, torch.tensor(y).unsqueeze(1) / 100 - 1.5
    train_loader = DataLoader(TensorDataset(X[:120], y[:120]), batch_size=50, shuffle=True)
    valid_loader = DataLoader(TensorDataset(X[120:190], y[120:190]), batch_size=50)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    criterion = nn.MSELoss()
    stopper = EarlyStopping(patience=4, verbose=True)
    for epoch in range(1, 21):
        model.train()
        train_losses = []
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            train_losses.append(loss.item())
        model.eval()
        valid_losses = []
        for data, target in valid_loader:
            valid_losses.append(criterion(model(data), target).item())
        valid_loss = np.average(valid_losses)
        print(f"[{epoch:>2}/20] train_loss: {np.average(train_losses):.10f} valid_loss: {valid_loss:.10f} lr {optimizer.param_groups[0]['lr']:g}")
        scheduler.step(valid_loss)
        stopper(valid_loss, model)
        if stopper.early_stop:
            print("Early stopping")
            break
    model.load_state_dict(torch.load("checkpoint.pt"))
    with torch.no_grad():
        print("best:", criterion(model(X[190:230]), y[190:230]).item())


if __name__ == "__main__":
    main()
