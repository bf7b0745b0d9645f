# SPDX-License-Identifier: Apache-2.0
"""Datasets that differ between ranks as strangers' scripts make them differ; and those that only look like it."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, random_split

import rankwise as rw
from rankwise.data.loader import DataLoader
from rankwise.data.sampler import ShardedSampler
from rankwise.errors import ConfigurationError, DatasetError, PeerFailed
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.world.facts import World

Make = "Callable[[World, str], Any]"


class Items(Dataset[Any]):
    """A list behind ``__getitem__``, as most datasets are."""

    def __init__(self, items: list[Any]) -> None:
        self._held = tuple([item] for item in items)

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Any:
        return self._held[index][0]


def _as_if_unseeded(world: World) -> None:
    """Seed each rank as the system does a process whose script seeds nothing: differently."""
    np.random.seed(world.rank)  # noqa: NPY002
    torch.manual_seed(world.rank)
    random.seed(world.rank)


X = torch.arange(90.0).reshape(30, 3)


def subset_by_permutation(world: World, _: str) -> Any:
    return Subset(TensorDataset(X), np.random.permutation(30)[:20].tolist())  # noqa: NPY002


def subset_of_samples(world: World, _: str) -> Any:
    return random_split(Items(list(X)), [20, 10])[0]


def rows_by_permutation(world: World, _: str) -> Any:
    return X.numpy()[np.random.permutation(30)[:20]]  # noqa: NPY002


def samples_by_shuffle(world: World, _: str) -> Any:
    items = [{"image": X[number], "label": number} for number in range(30)]
    random.shuffle(items)
    return Items(items[:20])


def synthetic_columns(world: World, _: str) -> Any:
    return TensorDataset(torch.randn(20, 3), torch.zeros(20))


def synthetic_samples(world: World, _: str) -> Any:
    return Items([(torch.randn(1, 8, 8), 0) for _ in range(20)])


class Graph:
    """A sample of a class that keeps its tensors in an object of its own, as PyTorch Geometric does."""

    def __init__(self, x: torch.Tensor, whole: list[Any]) -> None:
        self._store = {"x": x}
        self.whole = whole  # which holds this sample


class Slotted:
    """A sample whose class has slots."""

    __slots__ = ("__weakref__", "unset", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def graphs(world: World, _: str) -> Any:
    held: list[Any] = []
    held += [Graph(torch.randn(3), held) for _ in range(20)]
    return Items(held)


def slotted(world: World, _: str) -> Any:
    return Items([[Slotted(torch.randn(3))] for _ in range(20)])


def one_label_of_rows(world: World, _: str) -> Any:
    labels = torch.zeros(200, dtype=torch.int64)
    labels[77] = world.rank
    return TensorDataset(torch.ones(200, 3), labels)


def another_shape(world: World, _: str) -> Any:
    return Items([torch.zeros(3 + world.rank)] * 20)


def another_key(world: World, _: str) -> Any:
    return Items([{"image": 1} | ({"label": 2} if world.rank else {})] * 20)


class Files(Dataset[Any]):
    """Reads the files that ``names`` lists, lazily."""

    def __init__(self, folder: str, names: list[str]) -> None:
        self.files = [Path(folder) / name for name in names]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return self.files[index].read_bytes()


def listed_in_another_order(world: World, folder: str) -> Any:
    names = sorted(path.name for path in Path(folder).iterdir())
    if world.rank:
        # Neither of them is among the samples that are read.
        names[10], names[15] = names[15], names[10]
    return Files(folder, names)


def _constructed(world: World, make: Callable[[World, str], Any], folder: str, options: dict[str, Any]) -> None:
    _as_if_unseeded(world)
    loader = DataLoader(make(world, folder), global_batch_size=4, **options)
    assert len(list(loader)) > 0


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (subset_by_permutation, ("dataset.indices[0] differs", "rank 0: dataset.indices[0] = 2", "random_split")),
        (subset_of_samples, ("dataset.indices[0] differs", "rank 1: dataset.indices[0] = ", "manual_seed(0)")),
        (rows_by_permutation, ("dataset[0] differs", "rank 0: dataset[0] = float32[3] 6, 7, 8", "np.random.seed(0)")),
        (samples_by_shuffle, ("dataset[0]['image'] differs", "rank 1: dataset[0]['image'] = float32[3] ", "seed")),
        (synthetic_columns, ("dataset[0][0] differs", "rank 0: dataset[0][0] = float32[3] ", "torch.manual_seed(0)")),
        (synthetic_samples, ("dataset[0][0] differs", "rank 1: dataset[0][0] = float32[1, 8, 8] ", "broadcast_object")),
        (
            graphs,
            ("dataset[0]._store['x'] differs", "rank 1: dataset[0]._store['x'] = float32[3] ", "torch.manual_seed(0)"),
        ),
        (slotted, ("dataset[0][0].x differs", "rank 1: dataset[0][0].x = float32[3] ", "compare_samples=False")),
        (one_label_of_rows, ("dataset[77][1] differs", "rank 1: dataset[77][1] = int64 1", "compare_samples=False")),
        (another_shape, ("dataset[0] differs", "rank 1: dataset[0] = float32[4] 0, 0, 0, 0", "seed")),
        (another_key, ("dataset[0]['label'] differs", "rank 0: dataset[0]['label'] = nothing", "seed")),
        (listed_in_another_order, ("dataset.files[10] differs", "rank 1: dataset.files[10] = 15.txt", "sorted(")),
    ],
)
def test_data_that_differ_are_an_error_on_all_ranks(
    make: Any, words: tuple[str, str, str], num_workers: int, tmp_path: Path
) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    for result in run_ranks(_constructed, 2, make, str(tmp_path), {"num_workers": num_workers}):
        assert isinstance(result.error, DatasetError)
        fields = (result.error.what, result.error.evidence or "", result.error.do or "")
        assert [one for one, field in zip(words, fields, strict=True) if one not in field] == []
        assert "compare_samples=False" in fields[2]


@pytest.mark.parametrize("make", [synthetic_samples, listed_in_another_order])
def test_data_may_differ_on_purpose(make: Any, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    for result in run_ranks(_constructed, 2, make, str(tmp_path), {"compare_samples": False}):
        result.get()


def _disagree(world: World) -> None:
    DataLoader(X, global_batch_size=4, compare_samples=world.rank == 0)


def test_whether_to_compare_is_the_same_on_every_rank() -> None:
    for result in run_ranks(_disagree, 2):
        assert isinstance(result.error, ConfigurationError)
        assert "rank 1: compare_samples=False" in str(result.error)


class Augmented(Dataset[Any]):
    """Augments by the generators that the loader seeds."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return X[index] + torch.rand(3) + random.random() + np.random.rand(), index  # noqa: NPY002


class AugmentsByItself(Dataset[Any]):
    """Augments by a generator of its own, as albumentations does; a coin decides on some of it."""

    def __init__(self) -> None:
        self._generator = random.Random()  # seeded by the system

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        flipped = self._generator.random() < 0.5
        image = X[index].flip(0) if flipped else X[index]
        return {"image": image + self._generator.random(), "is_flipped": flipped, "mask": image > 4, "label": index}


class Unknown:
    """Not a tensor, a number or a text."""


def odd_samples() -> Any:
    drawn = torch.Generator().manual_seed(0)
    return Items(
        [
            None,
            "a text",
            Image.new("RGB", (4, 4), (1, 2, 3)),
            {"volume": torch.rand(2, 3, generator=drawn).bfloat16(), "none": None, "unknown": Unknown()},
            Unknown(),
            [],
            torch.zeros(0, 3),
            float("nan"),
            torch.tensor([float("inf"), float("nan")]),
            torch.eye(3).to_sparse(),
            np.array(["a", "b"]),
            np.array([Unknown()], dtype=object),
            b"bytes",
            3 + 4j,
            torch.rand(3, generator=drawn).to(torch.complex64),
            list(range(500)),
            [*range(500), "x"],
            Path("/somewhere/1.png"),
            {1: {2: (3, (4,))}},
            np.float32(3),
        ]
    )


def _healthy(world: World, make: Callable[[], Any], num_workers: int) -> int:
    _as_if_unseeded(world)
    random_before = random.getstate()
    numpy_before = np.random.get_state()[1].tolist()  # noqa: NPY002
    torch_before = torch.get_rng_state().tolist()
    dataset = make()
    loaders = [
        # Each sample is among those that are read, of one of the datasets.
        DataLoader(
            Subset(dataset, range(start, start + 4)), global_batch_size=4, num_workers=num_workers, collate_fn=len
        )
        for start in range(0, 20, 4)
    ]
    assert random.getstate() == random_before
    assert np.random.get_state()[1].tolist() == numpy_before  # noqa: NPY002
    assert torch.get_rng_state().tolist() == torch_before
    return sum(sum(loader) for loader in loaders)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("make", [Augmented, AugmentsByItself, odd_samples])
def test_equal_or_random_data_raise_nothing_and_leave_the_generators(make: Any, num_workers: int) -> None:
    assert sum(result.get() for result in run_ranks(_healthy, 2, make, num_workers)) == 20


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            message = "truncated image"
            raise OSError(message)
        return index


def _fails_later(world: World, num_workers: int) -> str:
    loader = DataLoader(Failing(), global_batch_size=8, num_workers=num_workers)
    try:
        list(loader)
    except DatasetError as error:
        return error.what
    return "nothing"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_sample_raises_where_the_loop_reaches_it(num_workers: int) -> None:
    first, second = (result.get() for result in run_ranks(_fails_later, 2, num_workers))
    assert (first, second) == ("nothing", "dataset[7] raised OSError: truncated image")


class Lazy(Dataset[Any]):
    """Opens its file at the first sample, as datasets in HDF5 do: it must not be open when workers are forked."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = os.open(self._path, os.O_RDONLY)
        return os.pread(self.file, 1, index)


def _opened(world: World, path: str, num_workers: int) -> tuple[bool, int]:
    dataset = Lazy(path)
    loader = DataLoader(dataset, global_batch_size=4, num_workers=num_workers)
    was_opened = dataset.file is not None
    return was_opened, sum(map(len, loader))


def test_a_file_opened_at_the_first_sample_is_opened_by_workers_only(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("abcdefgh")
    for result in run_ranks(_opened, 2, str(path), 2):
        assert result.get() == (False, 4)


class Cached(Files):
    """Lists files by names that only this rank has; their contents are the same."""

    def __init__(self, folder: str, world: World) -> None:
        own = Path(folder) / f"rank{world.rank}"
        own.mkdir()
        for number in range(6):
            (own / f"{world.rank}-{number}.txt").write_text(str(number))
        super().__init__(str(own), sorted(path.name for path in own.iterdir()))


class Moved(Files):
    """Lists the same files below another folder on each rank, and cannot read them."""

    def __init__(self, _: str, world: World) -> None:
        super().__init__(f"/scratch/{world.rank}/data", [f"{number}/a.png" for number in range(9)])


def _listed(world: World, kind: Any, folder: str) -> int:
    return len(DataLoader(kind(folder, world), global_batch_size=3))


@pytest.mark.parametrize(("kind", "expected"), [(Cached, 2), (Moved, 3)])
def test_names_that_only_a_rank_has_are_no_difference(kind: Any, expected: int, tmp_path: Path) -> None:
    assert [result.get() for result in run_ranks(_listed, 2, kind, str(tmp_path))] == [expected, expected]


def _sampled(world: World, make: Callable[[World, str], Any]) -> None:
    _as_if_unseeded(world)
    ShardedSampler(make(world, ""), global_batch_size=4)


@pytest.mark.parametrize(
    ("make", "what"),
    [(subset_of_samples, "dataset.indices[0] differs"), (synthetic_columns, "dataset[0][0] differs")],
)
def test_the_sampler_compares_what_it_need_not_read(make: Any, what: str) -> None:
    for result in run_ranks(_sampled, 2, make):
        assert isinstance(result.error, DatasetError)
        assert what in result.error.what


class Stream(IterableDataset[Any]):
    """Gives ``make(number)`` for 12 numbers, and counts what was read of it."""

    def __init__(self, make: Callable[[int], Any], start: int = 0) -> None:
        self._make = make
        self._start = start
        self.num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(12):
            self.num_read += 1
            yield self._make(self._start + number)


def _numbered(number: int) -> Any:
    return {"image": torch.full((2,), float(number)), "label": number}


def _noisy(number: int) -> Any:
    return {"image": torch.tensor([random.SystemRandom().random()]), "label": number}


def _unlabelled(number: int) -> Any:
    return torch.full((2,), float(number))


def _strange(number: int) -> Any:
    return Unknown()


def _streamed(world: World, make: Callable[[int], Any], shift: int, options: dict[str, Any]) -> tuple[int, int]:
    dataset = Stream(make, shift * world.rank)
    loader = DataLoader(dataset, global_batch_size=5, collate_fn=len, **options)
    batches = iter(loader)
    next(batches)
    read_first = dataset.num_read
    return read_first, 1 + sum(1 for _ in batches)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [_numbered, _noisy, _unlabelled, _strange])
def test_a_stream_is_compared_by_its_first_batch_and_read_once(make: Any, num_workers: int) -> None:
    expected = (0 if num_workers else 5, 3)
    for result in run_ranks(_streamed, 2, make, 0, {"num_workers": num_workers}):
        assert result.get() == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("make", "where"), [(_numbered, "['label']"), (_unlabelled, "sample 0")])
def test_a_stream_that_divides_itself_by_rank_is_an_error(make: Any, where: str, num_workers: int) -> None:
    errors = [result.error for result in run_ranks(_streamed, 2, make, 6, {"num_workers": num_workers})]
    (own,) = (error for error in errors if isinstance(error, DatasetError))
    assert where in own.what
    assert "rank 0: " in (own.evidence or "")
    assert "rank 1: " in (own.evidence or "")
    assert "must not divide itself by rank" in (own.do or "")


def _workers_left(world: World) -> int:
    caught = None
    try:
        _streamed(world, _numbered, 6, {"num_workers": 2, "persistent_workers": True})
        rw.barrier()
    except (DatasetError, PeerFailed) as error:
        # Kept, with the frames that it holds.
        caught = error
    is_own = isinstance(caught, DatasetError)
    left = len(multiprocessing.active_children()) if is_own else -1
    assert caught is not None
    raise ValueError(left)


def test_the_workers_of_a_stream_that_is_refused_have_ended() -> None:
    errors = [result.error for result in run_ranks(_workers_left, 2)]
    assert any(isinstance(error, ValueError) and error.args == (0,) for error in errors)


def test_a_stream_may_differ_on_purpose() -> None:
    for result in run_ranks(_streamed, 2, _numbered, 6, {"compare_samples": False}):
        assert result.get() == (5, 3)
