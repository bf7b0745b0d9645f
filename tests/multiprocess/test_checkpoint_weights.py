# SPDX-License-Identifier: Apache-2.0
"""Weights in plain safetensors files: written from every arrangement, read into every other, or not at all."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from arrangements import ARRANGEMENTS, built, check, trained
from safetensors.torch import load_file, load_model, save_file

from rankwise.checkpoint import export, import_weights, layouts
from rankwise.checkpoint.export import save_weights
from rankwise.checkpoint.import_weights import load_weights
from rankwise.comm.collectives import all_reduce
from rankwise.errors import CheckpointError, ConfigurationError, RankwiseError
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def _save_each(world: World, path: str) -> None:
    # Small pieces, so that the larger tensors take several and the ranks confirm in between.
    export.CHUNK_BYTES, export.CONFIRM_BYTES = 10_000, 50_000
    for name in ARRANGEMENTS:
        model, _ = trained(name, world.world_size)
        assert save_weights(f"{path}/{name}/model.safetensors", model) == Path(path) / name / "model.safetensors"


def _load_each(world: World, files: list[str]) -> None:
    expected, _ = trained("one", 1)
    for file in files:
        for name in ARRANGEMENTS:
            model, _ = built(name, world.world_size, seed=1)
            before = [layouts.local(p).data_ptr() for p in model.parameters()]
            assert load_weights(file, model) is model
            check(model.state_dict(), expected.state_dict())
            assert [layouts.local(p).data_ptr() for p in model.parameters()] == before


def test_weights_go_into_one_plain_file_and_back_from_any_arrangement(tmp_path: Path) -> None:
    for result in run_ranks(_save_each, 4, str(tmp_path)):
        result.get()
    expected = trained("one", 1)[0].state_dict()
    for name in ARRANGEMENTS:
        assert [file.name for file in (tmp_path / name).iterdir()] == ["model.safetensors"]
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == expected.keys() - {"block.1.weight", "tied_scale"}
        assert all(torch.equal(tensor, expected[key]) for key, tensor in written.items())
        model = built("one", 1, seed=1)[0]
        load_model(model, tmp_path / name / "model.safetensors")
        check(model.state_dict(), expected)

    # As others write them: an index, several files, both names of what is tied.
    folder = tmp_path / "indexed"
    folder.mkdir()
    parts = {"a.safetensors": list(expected)[::2], "b.safetensors": list(expected)[1::2]}
    for file, keys in parts.items():
        save_file({key: expected[key].clone() for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for result in run_ranks(_load_each, 4, [str(tmp_path / "shard" / "model.safetensors"), str(folder)]):
        result.get()


def _refused(world: World, path: str, files: list[str]) -> list[tuple[str, bool]]:
    model, _ = built("shard", world.world_size)
    if world.rank == 1:
        model.last.register_buffer("only_here", torch.zeros(2))
    before = [layouts.local(tensor).clone() for tensor in model.state_dict().values()]
    found: list[tuple[str, bool]] = []
    for file in files:
        try:
            load_weights(f"{path}/{file}", model)
        except RankwiseError as error:
            now = [layouts.local(tensor) for tensor in model.state_dict().values()]
            found.append((f"{type(error).__name__}: {error}", all(map(torch.equal, before, now))))
    return found


def test_weights_that_do_not_fit_on_one_rank_are_loaded_on_none(tmp_path: Path) -> None:
    good = {key: value.clone() for key, value in built("one", 1)[0].state_dict().items()} | {
        "last.only_here": torch.ones(2)
    }
    less = {key: value for key, value in good.items() if key not in ("last.only_here", "first.weight")}
    save_file(less | {"first.weights": good["first.weight"]}, tmp_path / "names")
    save_file(good | {"second.weight": torch.ones(7, 130)}, tmp_path / "shape")
    save_file(good | {"norm.num_batches_tracked": torch.tensor(1.0)}, tmp_path / "kind")
    save_file(good, tmp_path / "one rank")
    (tmp_path / "cut").write_bytes((tmp_path / "one rank").read_bytes()[:-8])
    files = ["names", "shape", "kind", "cut", "nothing", "one rank"]
    first, second = (result.get() for result in run_ranks(_refused, 2, str(tmp_path), files))
    assert len(first) == len(second) == len(files)
    assert all(unchanged for _, unchanged in first + second)
    names, shape, kind, cut, nothing, _ = (text for text, _ in second)
    assert "missing: first.weight (the files have first.weights)" in names
    assert "file: float32[7, 130]\n            model: float64[130, 7]" in shape
    assert "norm.num_batches_tracked" in kind
    assert "cannot be read" in cut
    assert "does not exist" in nothing
    # Only rank 1 has the buffer that the last file does hold.
    assert first[-1][0].startswith("CheckpointError")
    assert "unexpected: last.only_here" in first[-1][0]
    assert "Rank 0 failed" in second[-1][0]


def _fill_the_disk(world: World, path: str) -> tuple[str, int]:
    export.CONFIRM_BYTES = 100_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model, _ = built("shard", world.world_size)
    if world.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        save_weights(path, model)
        text = "no error"
    except RankwiseError as error:
        text = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return text, all_reduce(1)


def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("earlier")
    (tmp_path / ".model.safetensors.writing-0123456789abcdef").write_text("of a process that died")
    first, second = (result.get() for result in run_ranks(_fill_the_disk, 2, str(tmp_path / "model.safetensors")))
    assert first[0].startswith("CheckpointError")
    assert second[0].startswith("PeerFailed")
    for text, total in (first, second):
        assert "File too large" in text
        assert "a file that was there before is unchanged" in text
        assert total == 2
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("model.safetensors", "earlier")]


@pytest.mark.parametrize("weights", [{"a": 1}, {"a": torch.ones(2, dtype=torch.complex64)}, [torch.ones(2)]])
def test_values_that_such_files_cannot_hold_are_refused(tmp_path: Path, weights: object) -> None:
    with pytest.raises(RankwiseError, match=r"save_weights|complex64"):
        save_weights(tmp_path / "f", weights)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    # Without a world: from a mapping, into a module.
    save_weights(tmp_path / "f", {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "bias": torch.zeros(2)})
    assert load_weights(tmp_path / "f", torch.nn.Linear(3, 2)).weight.sum() == 6


def test_a_folder_without_enough_space_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    # As large as no disk, and without memory.
    endless = torch.zeros(1).expand(2**50)
    with pytest.raises(CheckpointError, match=r"(?s)No space left.*free 4096 TiB"):
        save_weights(tmp_path / "f", {"w": endless})
    assert list(tmp_path.iterdir()) == []


class _Doubling(torch.nn.Linear):
    """Gives other tensors than its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] * 2


def test_loading_a_model_whose_state_is_not_its_own_memory_has_an_effect(tmp_path: Path) -> None:
    save_weights(tmp_path / "f", torch.nn.Linear(3, 2))
    with pytest.raises(ConfigurationError, match=r"weight cannot be loaded in place: state_dict\(\) returns a copy"):
        load_weights(tmp_path / "f", _Doubling(3, 2))


def test_an_untied_file_is_not_loaded_into_a_tied_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_weights, "PIECE_BYTES", 64)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(4)))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(weights, tmp_path / "f")
    assert load_weights(tmp_path / "f", model) is model
    for first, second in (("0.weight", "1.weight"), ("2.weight", "3.weight")):
        untied = {key: value.clone() for key, value in weights.items()}
        untied[second][-1, -1] += 1
        save_file(untied, tmp_path / "g")
        with pytest.raises(CheckpointError, match=f"{first} and {second} are one tensor in the model but differ"):
            load_weights(tmp_path / "g", model)
        check(model.state_dict(), weights)


def test_wrong_arguments_are_refused_before_anything_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    file = save_weights(tmp_path / "f", model)
    expanded = torch.nn.Linear(3, 2)
    expanded.bias = torch.nn.Parameter(torch.zeros(1).expand(2))
    os.mkfifo(tmp_path / "pipe")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: save_weights(None, model), "must be the path of a file, got a NoneType"),  # type: ignore[arg-type]
        (lambda: load_weights(model, file), "must be the path of a file, got a Linear"),  # type: ignore[type-var]
        (lambda: load_weights(file, {"weight": torch.ones(2, 3)}), "needs a module, got a dict"),  # type: ignore[type-var]
        (lambda: save_weights(file, torch.nn.LazyLinear(2)), "has no shape yet"),
        (lambda: load_weights(file, torch.nn.LazyLinear(2)), "has no shape yet"),
        (lambda: load_weights(file, expanded), "bias cannot be loaded in place: it is an expanded tensor"),
        (lambda: save_weights(file, {"__metadata__": torch.ones(2)}), "cannot be named '__metadata__'"),
        (lambda: save_weights(tmp_path / "pipe", model), "is a device, a pipe or a socket, not a file"),
    ]
    for call, words in calls:
        with pytest.raises(ConfigurationError, match=words):
            call()
    assert load_file(file).keys() == {"weight", "bias"}
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_one_to_the_file_that_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, behind = tmp_path / "link", tmp_path / "elsewhere" / "f"
    link.symlink_to(behind)
    for number in range(2):
        assert save_weights(link, {"a": torch.tensor(number)}) == link
        assert link.is_symlink()
        assert load_file(behind)["a"] == number


def _name_different_files(world: World, path: str) -> list[str]:
    weights = {"weight": torch.ones(300, 300), "bias": torch.zeros(300)}
    for number in range(2):
        save_weights(f"{path}/{number}", {name: value + number for name, value in weights.items()})
    texts: list[str] = []
    model = torch.nn.Linear(300, 300)
    before = model.weight.clone()
    for call in (load_weights, save_weights):
        with pytest.raises(RankwiseError) as caught:
            call(f"{path}/{world.rank}", model)
        texts.append(str(caught.value))
    assert torch.equal(model.weight, before)
    return texts


def test_files_that_differ_between_ranks_are_refused_on_all(tmp_path: Path) -> None:
    for result in run_ranks(_name_different_files, 2, str(tmp_path)):
        loading, saving = result.get()
        assert "The files have different contents on different ranks" in loading
        assert f"rank 1: {tmp_path}/1" in saving
    assert load_file(tmp_path / "1")["bias"].sum() == 300
