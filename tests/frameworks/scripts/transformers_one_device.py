# SPDX-License-Identifier: Apache-2.0
"""Two models of transformers: with masks, a loss inside the model, a learning rate that first rises, and generation."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
WORDS, LONGEST = 50, 12
sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
classifier = BertForSequenceClassification(BertConfig(vocab_size=WORDS, hidden_size=24, num_labels=3, **sizes)).train()
config = GPT2Config(vocab_size=WORDS, n_positions=LONGEST, n_embd=24, n_layer=2, n_head=3, use_cache=False)
writer = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW([*classifier.parameters(), *writer.parameters()], lr=1e-3)
schedule = get_linear_schedule_with_warmup(optimizer, 2, 10)
for step in range(5):
    words = torch.randint(1, WORDS, (9, LONGEST))
    is_there = torch.arange(LONGEST) < torch.randint(4, LONGEST, (9, 1))
    kinds = torch.randint(0, 3, (9,))
    guesses = classifier(input_ids=words, attention_mask=is_there.long()).logits
    wrong = torch.nn.functional.cross_entropy(guesses, kinds)
    unlikely = writer(input_ids=words, labels=words).loss
    (wrong + unlikely).backward()
    torch.nn.utils.clip_grad_norm_(writer.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(step, wrong.item(), unlikely.item(), (guesses.argmax(1) == kinds).sum().item(), schedule.get_last_lr()[0])
writer.eval()
print(writer.generate(torch.randint(0, WORDS, (4, 3)), max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
