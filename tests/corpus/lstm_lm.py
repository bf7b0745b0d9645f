# SPDX-License-Identifier: Apache-2.0
# coding: utf-8
# Word-level language model, hidden state carried from one batch to the next (after the PyTorch examples).
import argparse
import math

import torch
import torch.nn as nn

TEXT = """the cat sat on the mat and the dog lay by the door . when the dog rose the cat ran up the stairs and the dog
ran after the cat . the cat hid under the bed and the dog sat by the bed . after a while the dog fell asleep and the cat
came down the stairs and sat on the mat . then the dog woke and lay by the door again , and so it went on all day ."""


class Corpus:
    def __init__(self, text):
        words = text.split()
        self.word2idx = {}
        for w in words:
            self.word2idx.setdefault(w, len(self.word2idx))
        self.ids = torch.tensor([self.word2idx[w] for w in words])


class RNNModel(nn.Module):
    """Container module with an encoder, a recurrent module, and a decoder."""

    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.2, tie_weights=True):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        self.rnn_type = rnn_type
        self.nhid = nhid
        self.nlayers = nlayers

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output).view(-1, self.ntoken)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))
        return weight.new_zeros(self.nlayers, bsz, self.nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i, bptt):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(model, source, bptt, criterion, bsz):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(bsz)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i, bptt)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="LSTM")
    parser.add_argument("--bptt", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.25)
    args = parser.parse_args()
    torch.manual_seed(1111)
    torch.set_default_dtype(torch.float64)
    corpus = Corpus(TEXT)
    train_data = batchify(corpus.ids, 5)
    model = RNNModel(args.model, len(corpus.word2idx), 12, 12, 2)
    criterion = nn.NLLLoss()
    lr = 5.0
    best_val_loss = None
    for epoch in range(1, 4):
        model.train()
        total_loss = 0.0
        hidden = model.init_hidden(5)
        for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
            data, targets = get_batch(train_data, i, args.bptt)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            total_loss += loss.item()
        val_loss = evaluate(model, train_data, args.bptt, criterion, 5)
        print(f"| end of epoch {epoch:3d} | batches {batch + 1} | train {total_loss / (batch + 1):.12g} | lr {lr:02.2f} "
              f"| valid loss {val_loss:.12g} | valid ppl {math.exp(val_loss):.10g}")
        if not best_val_loss or val_loss < best_val_loss:
            with open("model.pt", "wb") as f:
                torch.save(model.state_dict(), f)
            best_val_loss = val_loss
        else:
            lr /= 4.0


main()
