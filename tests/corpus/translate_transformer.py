# SPDX-License-Identifier: Apache-2.0
"""nn.Transformer, sequence first, learns to reverse sequences; padding is masked and ignored in the loss."""
import math

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

PAD_IDX, BOS_IDX, EOS_IDX = 0, 1, 2
SIZE = 9
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=50):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, emb_size=16, nhead=2, dropout=0.1):
        super().__init__()
        self.transformer = nn.Transformer(emb_size, nhead, 1, 1, 24, dropout)
        self.generator = nn.Linear(emb_size, SIZE)
        self.tok_emb = nn.Embedding(SIZE, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask, memory_key_padding_mask):
        src_emb = self.positional_encoding(self.tok_emb(src))
        tgt_emb = self.positional_encoding(self.tok_emb(trg))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, memory_key_padding_mask
        )
        return self.generator(outs)

    def encode(self, src, src_mask):
        return self.transformer.encoder(self.positional_encoding(self.tok_emb(src)), src_mask)

    def decode(self, tgt, memory, tgt_mask):
        return self.transformer.decoder(self.positional_encoding(self.tok_emb(tgt)), memory, tgt_mask)


def generate_square_subsequent_mask(sz):
    return torch.triu(torch.ones(sz, sz, dtype=torch.bool), diagonal=1)


def create_mask(src, tgt):
    src_seq_len, tgt_seq_len = src.shape[0], tgt.shape[0]
    tgt_mask = generate_square_subsequent_mask(tgt_seq_len)
    src_mask = torch.zeros((src_seq_len, src_seq_len)).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


def pairs(n):
    out = []
    for _ in range(n):
        s = torch.randint(3, SIZE, (int(torch.randint(2, 6, ())),))
        wrap = lambda t: torch.cat([torch.tensor([BOS_IDX]), t, torch.tensor([EOS_IDX])])  # noqa
        out.append((wrap(s), wrap(s.flip(0))))
    return out


def collate_fn(batch):
    return pad_sequence([b[0] for b in batch], padding_value=PAD_IDX), pad_sequence([b[1] for b in batch], padding_value=PAD_IDX)


transformer = Seq2SeqTransformer()
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX, label_smoothing=0.1)
optimizer = torch.optim.Adam(transformer.parameters(), lr=0.003, betas=(0.9, 0.98), eps=1e-9)
loader = torch.utils.data.DataLoader(pairs(45), batch_size=13, shuffle=True, collate_fn=collate_fn)
for epoch in range(1, 3):
    transformer.train()
    losses = 0
    for src, tgt in loader:
        tgt_input = tgt[:-1, :]
        masks = create_mask(src, tgt_input)
        logits = transformer(src, tgt_input, *masks, masks[2])
        optimizer.zero_grad()
        tgt_out = tgt[1:, :]
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    print(f"Epoch: {epoch}, Train loss: {losses / len(loader):.12f}")

transformer.eval()
with torch.no_grad():
    src = pairs(1)[0][0].view(-1, 1)
    memory = transformer.encode(src, torch.zeros(src.shape[0], src.shape[0]).type(torch.bool))
    ys = torch.ones(1, 1).fill_(BOS_IDX).type(torch.long)
    for _ in range(6):
        out = transformer.decode(ys, memory, generate_square_subsequent_mask(ys.size(0)))
        prob = transformer.generator(out.transpose(0, 1)[:, -1])
        ys = torch.cat([ys, torch.ones(1, 1).type_as(src.data).fill_(prob.argmax(1).item())], dim=0)
print("source", src.flatten().tolist(), "translation", ys.flatten().tolist(), prob.max().item())
