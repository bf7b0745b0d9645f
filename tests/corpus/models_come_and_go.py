# SPDX-License-Identifier: Apache-2.0
"""Many small models, one after another, none of which is kept; what is saved and pickled of each is as small as it is."""
import copy
import gc
import io
import os
import pickle
import weakref

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(269)
x = torch.randn(33, 4)
y = x.sum(1, keepdim=True)
alive, results = [], []
for width in range(2, 17):
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for part, answer in zip(x.split(17), y.split(17)):
        loss = nn.functional.mse_loss(model(part), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    alive += [weakref.ref(model), weakref.ref(model[0].weight)]
    results.append((loss.item(), width))
best = copy.deepcopy(model)
del model, optimizer, loss
gc.collect()
print("alive", sum(ref() is not None for ref in alive), "best", min(results))

weight = best[0].weight
print(type(weight).__name__, weight.is_leaf, weight.stride(), weight.storage_offset(), weight.untyped_storage().nbytes())
torch.save(best.state_dict(), "best.pt")
torch.save(weight, "weight.pt")
buffer = io.BytesIO()
torch.save(best, buffer)
print([os.path.getsize(name) for name in ("best.pt", "weight.pt")], len(pickle.dumps(weight)))
again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
loss = nn.functional.mse_loss(best(x), y)
loss.backward()
print(loss.item(), nn.functional.mse_loss(again(x), y).item(), again[0].weight.grad, repr(best).count("Linear"))
weight.grad = None
twin = copy.deepcopy(best)
with torch.no_grad():
    twin[0].weight.zero_()
    best[2].bias += 1
print(best(x).sum().item(), twin(x).sum().item(), again(x).sum().item())
print(weight.equal(torch.load("weight.pt")), sorted(best.__dict__), len(best._modules))
torch.save(best.state_dict(), "last.pt")
print(os.path.getsize("last.pt"), weight.untyped_storage().nbytes(), weight.storage_offset(), len(pickle.dumps(weight)))
