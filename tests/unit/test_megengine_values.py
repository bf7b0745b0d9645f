# SPDX-License-Identifier: Apache-2.0
"""What MegEngine's words give in one process: tensors, optimizers, modules, batches, datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

import rankwise.compat.megengine as mge
from rankwise.compat.megengine import functional, module, optimizer
from rankwise.compat.megengine.data import Collator, DataLoader, SequentialSampler, StreamSampler
from rankwise.compat.megengine.data.dataset import ArrayDataset, StreamDataset
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Pair(NamedTuple):
    """A sample with names."""

    left: int
    right: int


class Letters(StreamDataset):
    """Five samples that can only be iterated."""

    def __iter__(self) -> Iterator[str]:
        return iter("abcde")


@pytest.mark.parametrize(
    ("own", "name", "options"),
    [
        (optimizer.SGD, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
        (optimizer.Adam, "Adam", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.01}),
        (optimizer.AdamW, "AdamW", {"lr": 0.1}),
    ],
)
def test_optimizers_are_torch_s_whose_step_returns_them(own: Any, name: str, options: dict[str, Any]) -> None:
    theirs = getattr(torch.optim, name)
    ends, told = [], []
    # torch's class has a step with hooks around it from the first of its optimizers on.
    for kind in (theirs, own):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizing = kind([parameter], **options)
        optimizing.register_step_post_hook(lambda one, *_: told.append(type(one)))
        for step in range(3):
            parameter.grad = torch.full((3,), 1.0 + step, dtype=torch.float64)
            stepped = optimizing.step()
            assert (stepped is optimizing) == (kind is own)
        ends.append(parameter)
    assert torch.equal(*ends)
    assert told == [theirs] * 3 + [own] * 3, "once for each step"
    assert isinstance(optimizing, theirs)
    optimizing.step().clear_grad()
    assert parameter.grad is None
    scheduler = torch.optim.lr_scheduler.StepLR(optimizing, 1)
    parameter.grad = torch.ones(3, dtype=torch.float64)
    optimizing.step().clear_grad()
    scheduler.step()


def test_tensors_and_modules() -> None:
    given = np.arange(3)[::-1]
    assert mge.tensor(given).tolist() == [2, 1, 0]
    assert mge.tensor(np.random.RandomState(0).randn(1)).dtype is torch.float32
    assert mge.tensor(np.float64(2)).dtype is torch.float32
    assert mge.tensor(given, dtype=np.float32).dtype is mge.tensor([1], dtype="float32").dtype is torch.float32
    own = torch.zeros(2, requires_grad=True)
    copy = mge.tensor(own)
    assert not copy.requires_grad
    assert copy.data_ptr() != own.data_ptr()

    class Net(module.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = mge.Parameter(np.zeros((2, 3)))
            self.norm = torch.nn.BatchNorm1d(3)

    net = Net()
    assert [tuple(one.shape) for one in net.tensors()] == [(2, 3), (3,), (3,), (3,), (3,), ()]
    x, logits = torch.rand(2, 2, 2), torch.rand(4, 5, 3)
    labels = torch.randint(0, 3, (4, 5), dtype=torch.int32)
    assert functional.flatten(x, 1).shape == (2, 4)
    assert torch.equal(functional.matmul(x, x, transpose_a=True), x.mT @ x)
    expected = torch.nn.functional.cross_entropy(logits.reshape(20, 3), labels.flatten().long(), label_smoothing=0.1)
    assert torch.allclose(functional.nn.cross_entropy(logits, labels, axis=-1, label_smooth=0.1), expected)


def test_a_batch_is_made_as_documented() -> None:
    collate = Collator().apply
    rows = [np.full(2, 1.0), np.full(2, 2.0)]
    assert collate(rows).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert (collate([1, 2]).dtype, collate([1.0, 2.0]).dtype, collate([np.float32(1)]).dtype) == (
        np.dtype(int), np.dtype("float64"), np.dtype("float32"),
    )  # fmt: skip
    assert collate(["a", "b"]) == ["a", "b"]
    batch = collate([{"x": 1, "y": ("a", rows[0])}, {"x": 2, "y": ("b", rows[1])}])
    assert (batch["x"].tolist(), [*batch["y"][0]], batch["y"][1].shape) == ([1, 2], ["a", "b"], (2, 2))
    assert torch.equal(collate([torch.zeros(2), torch.ones(2)]), torch.tensor([[0.0] * 2, [1.0] * 2]))
    pair = collate([Pair(1, 2), Pair(3, 4)])
    assert (type(pair), pair.left.tolist(), pair.right.tolist()) == (Pair, [1, 3], [2, 4])
    for wrong in ([object()], [np.array(["a"])]):
        with pytest.raises(ConfigurationError, match="Cannot make a batch"):
            collate(wrong)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_in_its_order(num_workers: int) -> None:
    loader = DataLoader(Letters(), StreamSampler(2), num_workers=num_workers)
    assert [[*batch] for batch in loader] == [["a", "b"], ["c", "d"], ["e"]]
    assert [[*batch] for batch in DataLoader(Letters())] == [["a"], ["b"], ["c"], ["d"], ["e"]]


def test_refusals_say_what_to_write() -> None:
    letters, arrays = Letters(), ArrayDataset(np.arange(3), np.zeros((3, 2)))
    assert [one.tolist() for one in arrays[1]] == [1, [0.0, 0.0]]
    for call, words in (
        (lambda: ArrayDataset(np.arange(3), np.arange(4)), r"lengths \[3, 4\]"),
        (ArrayDataset, "one or more arrays"),
        (lambda: letters[0], "cannot be indexed"),
        (lambda: DataLoader(letters, SequentialSampler(arrays)), "pass a StreamSampler"),
        (lambda: DataLoader(arrays, StreamSampler()), "a SequentialSampler"),
        (lambda: DataLoader(arrays, range(3)), "was given a range"),
        (lambda: DataLoader(arrays, num_workers=-1), "num_workers must be >= 0, got -1"),
        (lambda: DataLoader(letters, parallel_stream=True), "parallel_stream"),
        (lambda: StreamSampler(0), "batch_size=0"),
        (lambda: functional.loss.cross_entropy(torch.ones(1, 1), torch.ones(1), with_logits=False), "nll_loss"),
        (lambda: module.Linear, r"torch\.nn\.Linear: change this import"),
        (lambda: module.ConvBn2d, r"torch\.nn"),
        (lambda: optimizer.MultiStepLR, r"lr_scheduler\.MultiStepLR"),
        (lambda: functional.nn.l1_loss, r"torch\.nn\.functional"),
        (lambda: mge.data.dataset.MNIST, r"torchvision\.datasets\.MNIST"),
        (lambda: mge.data.transform.Compose, r"torchvision\.transforms"),
        (lambda: mge.tensor([1], dtype="complex256"), "torch has no dtype"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            call()
    with pytest.raises(TypeError, match="no length"):
        len(letters)
    for owner in (optimizer, module, mge, mge.data, functional):
        assert owner in {module, functional} or not hasattr(owner, "nothing")
