# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
import torch.nn as nn
from sklearn.preprocessing import MinMaxScaler

# Airline passengers
raw = [112, 118, 132, 129, 121, 135, 148, 148, 136, 119, 104, 118, 115, 126, 141, 135, 125, 149, 170, 170, 158, 133, 114,
       140, 145, 150, 178, 163, 172, 178, 199, 199, 184, 162, 146, 166, 171, 180, 193, 181, 183, 218, 230, 242, 209, 191,
       172, 194, 196, 196, 236, 235, 229, 243, 264, 272, 237, 211, 180, 201]


def sliding_windows(data, seq_length):
    x, y = [], []
    for i in range(len(data) - seq_length - 1):
        x.append(data[i:(i + seq_length)])
        y.append(data[i + seq_length])
    return np.array(x), np.array(y)


sc = MinMaxScaler()
training_data = sc.fit_transform(np.array(raw, dtype=float).reshape(-1, 1))
seq_length = 4
x, y = sliding_windows(training_data, seq_length)
train_size = int(len(y) * 0.67)
trainX, trainY = torch.Tensor(x[:train_size]), torch.Tensor(y[:train_size])
testX, testY = torch.Tensor(x[train_size:]), torch.Tensor(y[train_size:])
trainX, trainY, testX, testY = [t.double() for t in (trainX, trainY, testX, testY)]


class LSTM(nn.Module):
    def __init__(self, num_classes, input_size, hidden_size, num_layers):
        super(LSTM, self).__init__()
        self.num_layers, self.hidden_size = num_layers, hidden_size
        self.lstm = nn.LSTM(input_size, hidden_size, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x):
        h_0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size).double()
        c_0 = torch.zeros(self.num_layers, x.size(0), self.hidden_size).double()
        ula, (h_out, _) = self.lstm(x, (h_0, c_0))
        return self.fc(h_out[-1])


torch.manual_seed(0)
lstm = LSTM(1, 1, 6, 1).double()
criterion = torch.nn.MSELoss()
optimizer = torch.optim.Adam(lstm.parameters(), lr=0.02)
best = float("inf")
for epoch in range(12):
    outputs = lstm(trainX)
    optimizer.zero_grad()
    loss = criterion(outputs, trainY)
    loss.backward()
    optimizer.step()
    if epoch % 4 == 0:
        lstm.eval()
        val = criterion(lstm(testX), testY).item()
        lstm.train()
        print("Epoch: %d, loss: %1.10f, val %1.10f" % (epoch, loss.item(), val))
        if val < best:
            best = val
            torch.save(lstm, "best_lstm.pth")  # the whole model
lstm = torch.load("best_lstm.pth", weights_only=False)
pred = sc.inverse_transform(lstm(testX).data.numpy())
print("last forecasts", pred[-3:].ravel().round(6).tolist())
