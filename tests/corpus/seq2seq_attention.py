# SPDX-License-Identifier: Apache-2.0
# Encoder and decoder with attention, teacher forcing by chance, one optimizer each
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

SOS, EOS, V, H = 0, 1, 8, 12
random.seed(7)
torch.manual_seed(7)
torch.set_default_dtype(torch.float64)


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.gru = nn.GRU(H, H, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.Wa, self.Ua, self.Va = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1)
        self.gru = nn.GRU(2 * H, H, batch_first=True)
        self.out = nn.Linear(H, V)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        decoder_input = torch.empty(encoder_outputs.size(0), 1, dtype=torch.long).fill_(SOS)
        decoder_hidden, outputs, attentions = encoder_hidden, [], []
        for i in range(5):
            out, decoder_hidden, attn = self.forward_step(decoder_input, decoder_hidden, encoder_outputs)
            outputs.append(out)
            attentions.append(attn)
            if target_tensor is not None:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                decoder_input = out.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1), decoder_hidden, torch.cat(attentions, dim=1)

    def forward_step(self, input, hidden, encoder_outputs):
        query = hidden.permute(1, 0, 2)
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(encoder_outputs))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        context = torch.bmm(weights, encoder_outputs)
        output, hidden = self.gru(torch.cat((self.embedding(input), context), dim=2), hidden)
        return self.out(output), hidden, weights


encoder, decoder = EncoderRNN(), AttnDecoderRNN()
optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (encoder, decoder)]
source = torch.randint(2, V, (40, 4))
target = torch.cat([source.flip(1), torch.full((40, 1), EOS)], 1)
criterion = nn.NLLLoss()
for epoch in range(2):
    total = 0
    for s, t in zip(source.split(7), target.split(7)):
        for o in optimizers:
            o.zero_grad()
        encoder_outputs, encoder_hidden = encoder(s)
        forced = random.random() < 0.6
        outputs, _, _ = decoder(encoder_outputs, encoder_hidden, t if forced else None)
        loss = criterion(outputs.view(-1, outputs.size(-1)), t.reshape(-1))
        loss.backward()
        for o in optimizers:
            o.step()
        total += loss.item()
    print("epoch", epoch, "loss", total / 6, "forced", forced)
encoder.eval()
with torch.no_grad():
    outputs, _, attention = decoder(*encoder(source[:1]))
print(source[0].tolist(), "->", outputs[0].argmax(-1).tolist(), f"{attention.max().item():.10g}")
