# SPDX-License-Identifier: Apache-2.0
"""Which device and backend a rank gets, as values; and that one room alone knows any type of accelerator by name."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError
from rankwise.launch.options import LaunchOptions
from rankwise.launch.start import num_ranks_here
from rankwise.world.device import accelerator, choice, kinds, streams
from rankwise.world.device.choice import Sight, index_of, refuse_unequipped

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rankwise"
EXCEPTIONS = {
    "auto/settings.py": {"cuda"},  # torch.backends.cuda, whose flags a script may set on any machine
    # Horovod's function, which scripts call.
    "compat/horovod/__init__.py": {"cuda_built"},
    "compat/horovod/extensions.py": {"cuda"},
    "compat/horovod/initialization.py": {"cuda"},
    # MegEngine's word for a type of device, which scripts pass.
    "compat/megengine/device.py": {"cuda"},
}


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the nodes of strings that stand for themselves: docstrings of modules, classes, functions, attributes."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _names_cuda(text: str) -> set[str]:
    """Return what in a module's code, but for docstrings and comments, names CUDA."""
    tree = ast.parse(text)
    passed_over = _docstrings(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and "cuda" in node.attr.lower():
            found.add(node.attr)
        elif isinstance(node, ast.Name) and "cuda" in node.id.lower():
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom) and "cuda" in str(node.module).lower():
            found.add(str(node.module))
        elif isinstance(node, ast.alias) and "cuda" in node.name.lower():
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
            found |= {node.value} if "cuda" in node.value.lower() else set()
    return found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("torch.cuda.is_available()", {"cuda"}),
        ("import torch.cuda", {"torch.cuda"}),
        ("from torch.cuda import nccl", {"torch.cuda"}),
        ("x = f'cuda:{index}'", {"cuda:"}),
        ("def f():\n    '''Of cuda.'''  # cuda\n", set()),
    ],
)
def test_a_name_is_seen(code: str, expected: set[str]) -> None:
    assert _names_cuda(code) == expected


def test_one_room_alone_names_a_type_of_accelerator() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.startswith("world/device/") and (names := _names_cuda(path.read_text())):
            found[name] = names
    assert found == EXCEPTIONS


def test_no_example_takes_an_accelerator_that_is_not_there() -> None:
    # Without check_available=True torch names the one it was built for, also on a machine that has none.
    files = [*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").rglob("*.md")]
    assert [path.name for path in files if "current_accelerator()" in path.read_text(encoding="utf-8")] == []


class Here:
    """A machine with ``count`` devices of a type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str | None, count: int) -> None:
        kind = None if name is None else kinds.kind_named(name)
        monkeypatch.setattr(accelerator, "found_kind", lambda: kind)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("here", "local_rank", "backend", "expected"),
    [
        ((None, 0), 0, None, "cpu"),
        (("cuda", 8), 5, None, "cuda:5"),
        (("cuda", 8), 5, "nccl", "cuda:5"),
        (("cuda", 8), 5, "gloo", "cpu"),
        (("xpu", 2), 1, None, "xpu:1"),
        (("npu", 8), 7, None, "npu:7"),
        (("mps", 1), 0, None, "mps:0"),
        (("mps", 1), 3, None, "mps:0"),
        (("standin", 4), 3, None, "standin:3"),
    ],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, here: tuple[str | None, int], local_rank: int, backend: str | None, expected: str
) -> None:
    Here(monkeypatch, *here)
    assert choice.choose_device(None, backend, local_rank) == expected
    assert choice.choose_device("cpu", backend, local_rank) == "cpu"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cuda", "Local rank 2 has no GPU: this machine has 2."),
        ("npu", "Local rank 2 has no NPU: this machine has 2."),
        ("other", "Local rank 2 has no device: this machine has 2."),
    ],
)
def test_a_rank_without_a_device_gets_an_error_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    Here(monkeypatch, name, 2)
    with pytest.raises(ConfigurationError, match=words):
        choice.choose_device(None, None, 2)


LAYOUTS = {
    # What each rank of a host with GPUs a to d sees, by (rank, local rank); and the GPU that is to be its own.
    "srun --gpu-bind=none, block": ({(0, 0): "abcd", (1, 1): "abcd", (2, 2): "abcd", (3, 3): "abcd"}, "abcd"),
    "srun -m cyclic, the second of two hosts": (
        {(1, 0): "abcd", (3, 1): "abcd", (5, 2): "abcd", (7, 3): "abcd"},
        "abcd",
    ),
    "srun -m cyclic, three tasks": ({(1, 0): "abcd", (3, 1): "abcd", (5, 2): "abcd"}, "abc"),
    "srun --gpus-per-task=1": ({(0, 0): "a", (1, 1): "b", (2, 2): "c", (3, 3): "d"}, "abcd"),
    "srun --gpus-per-task=1, the second host": ({(4, 0): "a", (5, 1): "b", (6, 2): "c", (7, 3): "d"}, "abcd"),
    "srun --gpus-per-task=2": ({(0, 0): "ab", (1, 1): "cd"}, "ac"),
    "srun --gpu-bind=single:1": ({(0, 0): "a", (1, 1): "b", (2, 2): "c", (3, 3): "d"}, "abcd"),
    "srun --gpu-bind=single:2, two GPUs per pair": ({(0, 0): "ab", (1, 1): "ab", (2, 2): "cd", (3, 3): "cd"}, "abcd"),
    "srun --gpu-bind=map_gpu:3,2,1,0": ({(0, 0): "d", (1, 1): "c", (2, 2): "b", (3, 3): "a"}, "dcba"),
    "jsrun -g1, no local rank": ({(0, None): "c", (1, None): "a"}, "ca"),
    "torchrun": ({(0, 0): "abcd", (1, 1): "abcd"}, "ab"),
    "torchrun --virtual-local-rank": ({(0, 0): "a", (1, 1): "b"}, "ab"),
    "ranks numbered against the local ranks": ({(0, 1): "ab", (1, 0): "ab"}, "ba"),
    "init_method, no local ranks": ({(0, None): "ab", (1, None): "ab"}, "ab"),
}


@pytest.mark.parametrize(("seen", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_rank_gets_a_device_of_its_own_in_every_layout(
    seen: dict[tuple[int, int | None], str], expected: str
) -> None:
    on_host = {rank: Sight(kind="cuda", devices=list(gpus), local_rank=local) for (rank, local), gpus in seen.items()}
    assert [sight.devices[index_of(rank, on_host)] for rank, sight in on_host.items()] == list(expected)
    refuse_unequipped("gpu-00", on_host, may_share=False)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (["a", "a"], r"Rank 1 has no GPU: 2 ranks on gpu-00 share 1 GPU\.\n.*at most one rank per GPU"),
        (["ab", "ab", "ab"], r"Rank 2 has no GPU: 3 ranks on gpu-00 share 2 GPUs\."),
        (
            ["ab", "a"],
            r"Ranks 0-1 on gpu-00 would use the same GPU: a\.\n.*rank 0: sees a, b\n.*rank 1: sees a\n.*srun",
        ),
    ],
)
def test_two_ranks_on_one_device_are_an_error_that_names_them(seen: list[str], words: str) -> None:
    on_host = {rank: Sight(kind="cuda", devices=list(gpus), local_rank=rank) for rank, gpus in enumerate(seen)}
    with pytest.raises(ConfigurationError, match=words):
        refuse_unequipped("gpu-00", on_host, may_share=False)


def test_a_requested_device_is_kept_and_shared_only_where_that_works() -> None:
    on_host = {rank: Sight(kind="cuda", devices=["a", "b"], local_rank=rank, requested=1) for rank in range(2)}
    assert [index_of(rank, on_host) for rank in on_host] == [1, 1]
    refuse_unequipped("gpu-00", on_host, may_share=True)
    with pytest.raises(ConfigurationError, match="Ranks 0-1 on gpu-00 would use the same GPU: b"):
        refuse_unequipped("gpu-00", on_host, may_share=False)
    refuse_unequipped("gpu-00", {0: Sight(local_rank=0), 1: Sight(local_rank=1)}, may_share=False)


def _with_uuids(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=uuids[index])

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_properties=properties))


@pytest.mark.parametrize(
    ("uuids", "mask", "expected"),
    [
        (("8a", "9b"), None, ("8a", "9b")),
        (("8a", "9b"), ["3", "2"], ("8a", "9b")),
        (("0-0", "0-0"), ["3", "2"], ("3", "2")),
        (("0-0", "0-0"), None, ("0", "1")),
        ((), ["3", "2", "1"], ("3", "2")),
        ((), None, ("0", "1")),
    ],
)
def test_devices_have_names_that_hold_for_the_machine(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...], mask: list[str] | None, expected: tuple[str, ...]
) -> None:
    Here(monkeypatch, "cuda", 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace())
    if uuids:
        _with_uuids(monkeypatch, *uuids)
    assert accelerator.machine_names(mask) == expected


def test_an_instance_of_a_gpu_has_the_name_that_its_mask_has(monkeypatch: pytest.MonkeyPatch) -> None:
    Here(monkeypatch, "cuda", 1)
    _with_uuids(monkeypatch, "8a")
    assert accelerator.machine_names(["MIG-1", "MIG-2"]) == ("MIG-1",)


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        (None, None, Sight(kind="cuda", devices=("8a", "9b"), local_rank=3)),
        ("cuda:1", None, Sight(kind="cuda", devices=("8a", "9b"), local_rank=3, requested=1)),
        ("cuda:1", "gloo", Sight(kind="cuda", devices=("8a", "9b"), local_rank=3, requested=1)),
        (None, "gloo", Sight(local_rank=3)),
        ("cpu", None, Sight(local_rank=3)),
    ],
)
def test_a_rank_looks_only_at_devices_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, device: str | None, backend: str | None, expected: Sight
) -> None:
    Here(monkeypatch, "cuda", 2)
    _with_uuids(monkeypatch, "8a", "9b")
    assert choice.look_at_devices(device, backend, 3, None) == expected


LISTED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 3g.20gb     Device  1: (UUID: MIG-cba663e8)
"""


@pytest.mark.parametrize(
    ("mask", "files", "expected"),
    [
        (None, ["nvidia-cap1", "nvidia-cap2", "nvidia-cap21"], ("MIG-c6d4f1ef", "MIG-cba663e8")),
        (None, ["nvidia-cap1", "nvidia-cap2"], ()),
        (["MIG-a", "MIG-b", "MIG-c"], [], ("MIG-a", "MIG-b", "MIG-c")),
        (["0"], ["nvidia-cap21"], ()),
        ([], ["nvidia-cap21"], ()),
    ],
    ids=["listed", "no instance", "mask", "mask of GPUs", "all hidden"],
)
def test_the_instances_of_a_gpu_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mask: list[str] | None, files: list[str], expected: tuple[str, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    program.chmod(0o755)
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(accelerator, "MIG_FILES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert accelerator.mig_instances(mask) == expected


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cuda:1", "nccl", torch.device("cuda:1")),
        ("cuda", "nccl", None),
        ("cuda:1", "gloo", None),
        ("xpu:0", "xccl", torch.device("xpu:0")),
        ("xpu:0", "gloo", None),
        ("cpu", "gloo", None),
    ],
)
@pytest.mark.usefixtures("all_backends")
def test_torch_is_told_the_device_where_its_backend_has_one(
    device: str, backend: str, expected: torch.device | None
) -> None:
    assert choice.bound_device(device, backend) == expected


@pytest.fixture
def all_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch offer every backend of its table, and those that packages register."""
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    table = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mps": "gloo", "npu": "hccl", "hpu": "fake"}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", table)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "hccl"])
    carried = {"gloo": ["cpu", "cuda"], "nccl": ["cuda"], "xccl": ["xpu"], "hccl": ["npu"], "fake": ["hpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", carried)


@pytest.mark.parametrize(
    ("device", "backend", "chosen", "opened", "through_host"),
    [
        ("cpu", None, "gloo", "gloo", False),
        ("cuda:1", None, "nccl", "cpu:gloo,cuda:nccl", False),
        ("cuda:1", "gloo", "gloo", "gloo", False),
        ("xpu:1", None, "xccl", "cpu:gloo,xpu:xccl", False),
        ("xpu:1", "gloo", "gloo", "gloo", True),
        ("npu:1", None, "hccl", "cpu:gloo,npu:hccl", False),
        ("mps:0", None, "gloo", "gloo", True),
        ("hpu:0", None, "gloo", "gloo", True),
        ("standin:0", None, "gloo", "gloo", True),
    ],
)
@pytest.mark.usefixtures("all_backends")
def test_the_backend_of_a_device(
    device: str, backend: str | None, chosen: str, opened: str, through_host: bool
) -> None:
    assert choice.choose_backend(backend, device) == chosen
    assert choice.torch_backends(device, chosen) == opened
    assert choice.goes_through_host(device, chosen) is through_host


def test_a_backend_that_cannot_be_had_is_an_error_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"The backend nccl needs a GPU, but this rank's device is cpu"):
        choice.choose_backend("nccl", "cpu")
    with pytest.raises(ConfigurationError, match=r"Unknown backend 'ncll'.*\n.*use one of gloo"):
        choice.choose_backend("ncll", "cpu")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    with pytest.raises(ConfigurationError, match=r"built without xccl, the backend for xpu.*\n.*backend='gloo'"):
        choice.choose_backend(None, "xpu:0")
    with pytest.raises(ConfigurationError, match="built without the backend nccl"):
        choice.choose_backend("nccl", "cuda:0")
    assert choice.known_backends() == ["gloo"]


@pytest.mark.parametrize(("name", "shown"), [("xpu", "xpu:1"), (None, "cuda:1"), ("npu", "npu:1")])
def test_examples_name_the_accelerator_that_is_here(
    monkeypatch: pytest.MonkeyPatch, name: str | None, shown: str
) -> None:
    Here(monkeypatch, name, 2)
    assert accelerator.example(1) == shown


def test_ranks_to_start_on_other_accelerators() -> None:
    with pytest.raises(ConfigurationError, match=r"4 ranks were requested on a machine with 2 NPUs\.\n.*without NPUs"):
        num_ranks_here(LaunchOptions(num_ranks=4), 2, kinds.kind_named("npu"))


def test_the_cpu_has_no_stream_and_its_batches_are_not_pinned() -> None:
    cpu = torch.device("cpu")
    assert streams.new_stream(cpu) is None
    assert not streams.pins(cpu)
    assert not streams.pins(torch.device("mps"))


def test_versions_are_those_torch_was_built_with() -> None:
    expected = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    assert {name: accelerator.toolkits().get(name) for name in expected} == expected
    assert (accelerator.nccl_version() is None) == (not dist.is_nccl_available())
