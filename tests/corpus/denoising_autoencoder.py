# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # Denoising autoencoder (exported from a notebook)

# %%
import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.set_default_dtype(torch.float64)
torch.manual_seed(100)
noise_factor = 0.3

# %%
X = torch.from_numpy(load_digits().data[:130] / 16.0)
train_data, val_data = torch.utils.data.random_split(X, [100, 30])
train_loader = torch.utils.data.DataLoader(train_data, batch_size=17, shuffle=True)
val_loader = torch.utils.data.DataLoader(val_data, batch_size=17)


# %%
class Encoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(64, 24), nn.ReLU(True), nn.Linear(24, d))

    def forward(self, x):
        return self.lin(x)


class Decoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(d, 24), nn.ReLU(True), nn.Linear(24, 64))

    def forward(self, x):
        return torch.sigmoid(self.lin(x))


encoder, decoder = Encoder(4), Decoder(4)
loss_fn = nn.MSELoss()
params_to_optimize = [{"params": encoder.parameters()}, {"params": decoder.parameters()}]
optim = torch.optim.Adam(params_to_optimize, lr=5e-3, weight_decay=1e-5)


# %%
def add_noise(inputs):
    return torch.clip(inputs + torch.randn_like(inputs) * noise_factor, 0.0, 1.0)


history = {"train_loss": [], "val_loss": []}
for epoch in range(3):
    encoder.train()
    decoder.train()
    train_loss = []
    for image_batch in train_loader:
        image_noisy = add_noise(image_batch)
        decoded_data = decoder(encoder(image_noisy))
        loss = loss_fn(decoded_data, image_batch)
        optim.zero_grad()
        loss.backward()
        optim.step()
        train_loss.append(loss.detach().cpu().numpy())
    encoder.eval()
    decoder.eval()
    with torch.no_grad():
        conc_out, conc_label = [], []
        for image_batch in val_loader:
            conc_out.append(decoder(encoder(add_noise(image_batch))))
            conc_label.append(image_batch)
        val_loss = loss_fn(torch.cat(conc_out), torch.cat(conc_label))
    history["train_loss"].append(np.mean(train_loss))
    history["val_loss"].append(val_loss.item())
    print("\n EPOCH {}/{} \t train loss {:.12f} \t val loss {:.12f}".format(epoch + 1, 3, np.mean(train_loss), val_loss.data))

# %%
np.savez("history.npz", **history)
history
