# SPDX-License-Identifier: Apache-2.0
import random
from collections import Counter

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

corpus = """the king loves the queen and the queen loves the king . the man walks the dog and the woman walks the cat .
a king is a man and a queen is a woman . the dog chases the cat and the cat chases the mouse .""".split()


class SkipGram(nn.Module):
    def __init__(self, vocab, dim):
        super(SkipGram, self).__init__()
        self.u_embeddings = nn.Embedding(vocab, dim, sparse=True)
        self.v_embeddings = nn.Embedding(vocab, dim, sparse=True)
        nn.init.uniform_(self.u_embeddings.weight, -0.5 / dim, 0.5 / dim)
        nn.init.zeros_(self.v_embeddings.weight)

    def forward(self, pos_u, pos_v, neg_v):
        emb_u = self.u_embeddings(pos_u)
        score = torch.clamp(torch.sum(emb_u * self.v_embeddings(pos_v), dim=1), max=10, min=-10)
        score = -F.logsigmoid(score)
        neg_score = torch.bmm(self.v_embeddings(neg_v), emb_u.unsqueeze(2)).squeeze(2)
        neg_score = -torch.sum(F.logsigmoid(-torch.clamp(neg_score, max=10, min=-10)), dim=1)
        return torch.mean(score + neg_score)


def main():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    freq = Counter(corpus)
    words = [w for w, _ in freq.most_common()]
    index = {w: i for i, w in enumerate(words)}
    prob = np.array([freq[w] for w in words]) ** 0.75
    prob /= prob.sum()
    pairs = [
        (index[w], index[corpus[j]])
        for i, w in enumerate(corpus)
        for j in range(max(0, i - 2), min(len(corpus), i + 3))
        if i != j
    ]
    model = SkipGram(len(words), 8)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.02)
    for it in range(2):
        random.shuffle(pairs)
        running_loss = 0.0
        for i in range(0, len(pairs), 41):
            chunk = pairs[i : i + 41]
            pos_u, pos_v = (torch.tensor(c) for c in zip(*chunk))
            neg = torch.from_numpy(np.random.choice(len(words), (len(chunk), 3), p=prob))
            optimizer.zero_grad()
            loss = model(pos_u, pos_v, neg)
            loss.backward()
            optimizer.step()
            running_loss = running_loss * 0.9 + loss.item() * 0.1
            if i % 82 == 0:
                print(" Loss:", running_loss)
    with open("vectors.txt", "w") as f:
        f.write("%d %d\n" % (len(words), 8))
        for w, v in zip(words, model.u_embeddings.weight.tolist()):
            f.write("%s %s\n" % (w, " ".join(f"{a:.12g}" for a in v)))


main()
