# SPDX-License-Identifier: Apache-2.0
"""Train a small Keras model on scikit-learn's handwritten digits, with gradients that rankwise sums over the ranks.

Keras and TensorFlow compute; rankwise distributes the samples and sums the gradients; `rankwise.all_reduce` takes
TensorFlow's tensors and returns the same kind. Runs on any number of ranks, with the same result; needs `pip install
tensorflow`, or `tensorflow-cpu`:
    python examples/keras_digits.py
    rankwise run -n 3 examples/keras_digits.py
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
import tensorflow as tf
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import rankwise as rw

keras.config.set_floatx("float64")


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test digits of 64 pixels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, labels = torch.tensor(data.data / 16)[order], torch.tensor(data.target)[order]
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = keras.optimizers.Adam(options.lr)
    sum_of_losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    with rw.join():
        train_set, test_set = digits()
        # Every rank starts with rank 0's weights: equal seeds are not needed for it.
        model.set_weights(rw.broadcast(model.get_weights()))
        loader = rw.DataLoader(train_set, global_batch_size=options.global_batch_size, shuffle=True, seed=0)
        for epoch in range(options.epochs):
            epoch_loss = 0.0
            for x, y in loader:
                with tf.GradientTape() as tape:
                    loss = sum_of_losses(y.numpy(), model(x.numpy(), training=True))
                found = loss, tape.gradient(loss, model.trainable_variables)
                # Sums, not means: ranks may have different numbers of samples, in the last batch.
                (loss, gradients), num_samples = rw.all_reduce((found, len(y)))
                optimizer.apply([gradient / num_samples for gradient in gradients], model.trainable_variables)
                epoch_loss += float(loss)
            rw.print(f"epoch {epoch + 1:2}  loss {epoch_loss / len(train_set):.10f}")
        right = 0
        for x, y in rw.DataLoader(test_set, global_batch_size=120):
            right += int((model(x.numpy()).numpy().argmax(1) == y.numpy()).sum())
        rw.print(f"accuracy {rw.all_reduce(right) / len(test_set):.4f}")


if __name__ == "__main__":
    main()
