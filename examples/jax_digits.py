# SPDX-License-Identifier: Apache-2.0
"""Train a small net of JAX on scikit-learn's handwritten digits, with gradients that rankwise sums over the ranks.

JAX computes; rankwise distributes the samples and sums the gradients; `rankwise.all_reduce` takes the whole tree
of JAX arrays and gives one back. Runs on any number of ranks, with the same result:
    python examples/jax_digits.py
    rankwise run -n 3 examples/jax_digits.py
"""

from __future__ import annotations

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import rankwise as rw

jax.config.update("jax_enable_x64", True)
Parameters = list[dict[str, jax.Array]]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test digits of 64 pixels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = torch.tensor(data.data / 16)[order], torch.tensor(data.target)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def new_parameters(seed: int) -> Parameters:
    keys = jax.random.split(jax.random.key(seed), 2)
    sizes = [(64, 128), (128, 10)]
    return [
        {"weight": jax.random.normal(key, size) / np.sqrt(size[0]), "bias": jnp.zeros(size[1])}
        for key, size in zip(keys, sizes, strict=True)
    ]


@jax.jit
def logits(parameters: Parameters, x: jax.Array) -> jax.Array:
    hidden, last = parameters
    return jax.nn.relu(x @ hidden["weight"] + hidden["bias"]) @ last["weight"] + last["bias"]


@jax.jit
def sum_of_losses(parameters: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits(parameters, x))[jnp.arange(len(y)), y].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.2)
    options = parser.parse_args()

    value_and_gradient = jax.jit(jax.value_and_grad(sum_of_losses))
    with rw.join():
        train_set, test_set = digits()
        parameters = rw.broadcast(new_parameters(seed=0))
        loader = rw.DataLoader(train_set, global_batch_size=options.global_batch_size, shuffle=True, seed=0)
        for epoch in range(options.epochs):
            epoch_loss = 0.0
            for x, y in loader:
                found = value_and_gradient(parameters, jnp.asarray(x.numpy()), jnp.asarray(y.numpy()))
                # Sums, not means: ranks may have different numbers of samples, in the last batch.
                (loss, gradients), num_samples = rw.all_reduce((found, len(y)))
                step = partial(jnp.multiply, -options.lr / num_samples)
                parameters = jax.tree.map(jnp.add, parameters, jax.tree.map(step, gradients))
                epoch_loss += float(loss)
            rw.print(f"epoch {epoch + 1:2}  loss {epoch_loss / len(train_set):.10f}")
        right = 0
        for x, y in rw.DataLoader(test_set, global_batch_size=120):
            right += int((logits(parameters, jnp.asarray(x.numpy())).argmax(1) == jnp.asarray(y.numpy())).sum())
        rw.print(f"accuracy {rw.all_reduce(right) / len(test_set):.4f}")


if __name__ == "__main__":
    main()
