# SPDX-License-Identifier: Apache-2.0
import json

import torch


def write(model, x, y, path):
    path.parent.mkdir()
    with torch.no_grad():
        right = ((model(x)[:, 0] > 0) == (y > 0)).double().mean().item()
    path.write_text(json.dumps({"right": right, "weights": {n: p.sum().item() for n, p in model.named_parameters()}}))
