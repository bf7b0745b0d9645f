# SPDX-License-Identifier: Apache-2.0
"""A placed model computes what it computed before: with weights in memory, in files, in both, fetched and ahead."""

from __future__ import annotations

import copy
import gc
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwise.errors import CheckpointError, ConfigurationError, RankwiseError
from rankwise.parallel.place import fetch
from rankwise.parallel.place.calls import place, placement
from rankwise.parallel.place.offload_files import OffloadFiles
from rankwise.parallel.place.plan import Size
from rankwise.parallel.place.units import sizes_of, units_of
from rankwise.tensor_files import open_tensor_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankwise.parallel.place.away import Away

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Every fetching thread would otherwise start threads of its own on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A tensor of its own, tied weights, a block that is called twice, and layers that read weights themselves."""

    def __init__(self, *, recompute: str = "") -> None:
        super().__init__()
        self.recompute = recompute
        self.shift = nn.Parameter(torch.randn(6))
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.attention = nn.TransformerEncoderLayer(6, 2, 7, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.shift
        for block in [*self.blocks, self.blocks[0]]:
            x = self._called(block, x.flatten(0, 1)).unflatten(0, tokens.shape)
        return self.head(self.lstm(self.attention(x))[0])

    def _called(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.recompute:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


def _net(**options: str) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def _batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(13, (5, 3), generator=generator), torch.randint(13, (15,), generator=generator)


def _step(model: nn.Module, seed: int) -> float:
    x, y = _batch(seed)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    loss.backward()
    return loss.item()


def _difference(left: nn.Module, right: nn.Module) -> float:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max() / b[key].abs().max().clamp(min=1e-6)) for key in a)


PLANS: dict[str, Any] = {
    "all on disk": ({"": "disk"}, None),
    "some on disk": ({"": "cpu", "blocks": "disk", "blocks.1": "cpu", "lstm": "disk"}, None),
    "all in memory": ({"": "cpu"}, None),
    "overflowing": ("auto", {"cpu": 8000}),
    "no room for two": ("sequential", {"cpu": 3200}),
}


@pytest.mark.parametrize("name", PLANS)
def test_training_is_exact(name: str, tmp_path: Path) -> None:
    plan, budgets = PLANS[name]
    one, placed = _net(), _net()
    before = dict(placed.named_parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (one, placed)]
    assert place(placed, plan, budgets=budgets, offload_folder=tmp_path) is placed
    assert dict(placed.named_parameters()).items() == before.items()
    assert placed.head.weight is placed.embed.weight
    for seed in range(4):
        losses = [_step(model, seed) for model in (one, placed)]
        assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert _difference(placed, one) <= TOLERANCE
    on_disk = {part.module for part in placement(placed).parts if part.device == "disk"}
    assert bool(on_disk) == (name != "all in memory")
    if on_disk:
        # What the optimizer wrote is in the files.
        with open_tensor_files(next(tmp_path.iterdir())) as files:
            assert {key for key in one.state_dict() if key.startswith("lstm.")} <= set(files.entries)
            state = one.state_dict()
            for key in files.entries:
                assert torch.allclose(files.read(key), state[key], rtol=TOLERANCE, atol=TOLERANCE)
    del placed, optimizers, before
    gc.collect()
    assert list(tmp_path.iterdir()) == []


class Live:
    """Counts fetched bytes that are in memory, and who fetched."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.most_bytes = 0
        self.fetched_by: list[str] = []
        self._lock = threading.Lock()

    def count(self, change: int) -> None:
        with self._lock:
            self.now_bytes += change
            self.most_bytes = max(self.most_bytes, self.now_bytes)

    def take(self) -> tuple[int, int, int]:
        """Return the bytes now, the most since the last call, and how many parts a thread fetched since then."""
        taken = self.now_bytes, self.most_bytes, self.fetched_by.count("rankwise-fetch")
        self.most_bytes = self.now_bytes
        self.fetched_by.clear()
        return taken


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Live:
    counts = Live()
    copies = fetch._copies

    def counted(away: Away) -> list[torch.Tensor]:
        data = copies(away)
        counts.fetched_by.append(threading.current_thread().name)
        for tensor in data:
            counts.count(tensor.nbytes)
            # The storage lives as long as anything that shares its memory.
            weakref.finalize(tensor.untyped_storage(), counts.count, -tensor.nbytes)
        return data

    monkeypatch.setattr(fetch, "_copies", counted)
    return counts


def _tower(depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(depth)]).double()


def test_at_most_two_layers_are_in_memory_and_none_waits_for_backward(live: Live, tmp_path: Path) -> None:
    layer_bytes = 20 * 20 * 8
    model = place(_tower(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    for step in range(3):
        loss = model(x).square().mean()
        now, most, ahead = live.take()
        assert now == 0
        assert most <= 2 * layer_bytes
        # In the first forward nobody knows yet what comes next.
        assert ahead == (5 if step else 0)
        loss.backward()
        now, most, ahead = live.take()
        assert now == 0
        assert most <= 2 * layer_bytes
        assert ahead == 5
    with torch.no_grad():
        model(x)
    assert live.take()[0] == 0
    tight = place(_tower(), "auto", budgets={"cpu": layer_bytes}, offload_folder=tmp_path)
    for _ in range(2):
        tight(x).sum().backward()
    assert live.take() == (0, layer_bytes, 0)


def test_nothing_that_was_fetched_stays(live: Live, tmp_path: Path) -> None:
    """Not even in what torch's recurrent layers keep for themselves."""
    model = place(_net(), {"": "disk"}, offload_folder=tmp_path)
    with torch.no_grad():
        model(_batch(0)[0])
    now, most, _ = live.take()
    assert now == 0
    assert most > 0
    _step(model, 0)
    assert live.take()[0] == 0


def test_a_model_that_is_one_block(live: Live, tmp_path: Path) -> None:
    seen: list[int] = []

    class Single(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.data_ptr())
            return super().forward(x)

    model = place(Single(3, 2), {"": "disk"}, offload_folder=tmp_path)
    model(torch.ones(1, 3)).sum().backward()
    assert seen != [model.weight.data_ptr()]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2
    assert live.take()[0] == 0


def test_tied_parts_are_known(tmp_path: Path) -> None:
    sizes = {size.name: size for size in sizes_of(units_of(_net()), lambda slot: slot.tensor.nbytes)}
    assert list(sizes) == ["shift", "embed", "blocks.0", "blocks.1", "blocks.2", "attention", "lstm", "head"]
    assert sizes["head"] == Size("head", 13 * 8, (13 + 13 * 6) * 8, "embed")
    one, placed = _net(), place(_net(), {"": "cpu", "head": "disk"}, offload_folder=tmp_path)
    assert "weights shared with embed are on cpu" in str(placement(placed))
    assert _step(placed, 0) == pytest.approx(_step(one, 0), rel=TOLERANCE)
    assert torch.allclose(placed.embed.weight.grad, one.embed.weight.grad, rtol=1e-9, atol=1e-12)


def test_space_on_disk_is_taken_before_it_is_written(tmp_path: Path) -> None:
    files = OffloadFiles(tmp_path)
    files.tensors({"weight": (torch.float32, (100_000,))})
    (file,) = files.folder.iterdir()
    assert file.stat().st_blocks * 512 >= 400_000
    with pytest.raises(ConfigurationError, match=r"no torch\.complex128"):
        files.tensors({"weight": (torch.complex128, (1,))})


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputing_activations(recompute: str, tmp_path: Path) -> None:
    one, placed = _net(), _net(recompute=recompute)
    place(placed, {"": "disk"}, offload_folder=tmp_path)
    calls: list[nn.Module] = []
    placed.blocks[1].up.register_forward_hook(lambda module, *_: calls.append(module))
    for seed in range(2):
        assert _step(placed, seed) == pytest.approx(_step(one, seed), rel=TOLERANCE)
        assert len(calls) == 2 * (seed + 1)
    for (name, left), right in zip(placed.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12), name


def test_recomputing_a_layer_inside_a_block(tmp_path: Path) -> None:
    class Recomputing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(lambda x: self.down(torch.relu(self.up(x))), self.norm(x), use_reentrant=False)

    torch.manual_seed(0)
    one = nn.Sequential(Block(4), Block(4)).double()
    placed = nn.Sequential(Recomputing(4), Recomputing(4)).double()
    placed.load_state_dict(one.state_dict())
    place(placed, {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(5, 4, dtype=torch.float64)
    for model in (one, placed):
        model(x).square().sum().backward()
    for left, right in zip(placed.parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12)


def test_inference_frozen_layers_and_second_derivatives(tmp_path: Path) -> None:
    one = _tower(3)
    one[1].requires_grad_(False)
    placed = place(copy.deepcopy(one), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(placed(x), one(x))
    with torch.inference_mode():
        assert torch.equal(placed(x), one(x))
    # A layer on its own, without the model around it.
    assert torch.equal(placed[1](x), one[1](x))
    seconds = []
    for model in (one, placed):
        output = torch.tanh(model(x)).sum()
        (first,) = torch.autograd.grad(output, model[0].weight, create_graph=True)
        first.square().sum().backward()
        assert model[1].weight.grad is None
        seconds.append(model[2].weight.grad)
    assert torch.allclose(seconds[0], seconds[1], rtol=1e-9, atol=1e-12)


def test_a_forward_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    one, placed = _net(), place(_net(), {"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(IndexError):
        placed(torch.tensor([[13]]))
    broken = placed.attention.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _step(placed, 0)
    broken.remove()
    assert all("weight" not in vars(module) for module in placed.modules())
    placed.load_state_dict(one.state_dict())
    assert _step(placed, 0) == pytest.approx(_step(one, 0), rel=TOLERANCE)


def test_an_interrupted_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    one, placed = _tower(), _tower()
    for layer in placed[3:]:
        layer.to("meta")
    place(placed, {"": "meta", "2": "cpu", "1": "disk", "0": "cpu"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (1, 2):
        interrupted = placed[number].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            placed(x)
        interrupted.remove()
        # torch's stacks of modes and hooks are as before.
        assert torch.overrides._get_current_function_mode_stack() == []
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert placed(x).is_meta
    assert torch.equal(placed[1](placed[0](x)), one[1](one[0](x)))


def test_a_layer_after_an_interrupt_sees_what_it_holds(tmp_path: Path) -> None:
    one, placed = Block(3).double(), nn.Sequential(Block(3).double(), nn.Linear(3, 3).double())
    placed[0].load_state_dict(one.state_dict())
    place(placed.eval(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 3, dtype=torch.float64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Once in the block, once in a layer that is called without it; what is fetched ahead is of before, too.
    for interrupted in (placed[1], placed[0].down):
        removed = interrupted.register_forward_pre_hook(interrupt)
        for called in (placed, interrupted):
            with pytest.raises(KeyboardInterrupt):
                called(x if called is not placed[0].down else torch.ones(1, 6, dtype=torch.float64))
        removed.remove()
    with torch.no_grad():
        for parameter in (*placed[0].parameters(), *one.parameters()):
            parameter.mul_(2)
        assert torch.equal(placed[0].down.weight, one.down.weight)
        assert torch.equal(placed[0](x), one.eval()(x))


def _assigned(model: Net) -> nn.Module:
    with torch.no_grad():
        state = {key: value + 1 for key, value in _net().state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def _tied(model: Net) -> nn.Module:
    model.blocks[1].up.weight = model.blocks[2].up.weight
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    model.blocks[0].down.bias = None
    return model


class Functional(nn.Module):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: self.scale * parameter for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, (x,))


@pytest.mark.parametrize("replaced", [_assigned, _tied, Functional])
def test_parameters_that_are_replaced_later_are_used(replaced: Any, tmp_path: Path) -> None:
    one, placed = (replaced(model) for model in (_net(), place(_net(), {"": "disk"}, offload_folder=tmp_path)))
    for _ in range(2):
        assert _step(placed, 0) == pytest.approx(_step(one, 0), rel=TOLERANCE)
    for (name, left), right in zip(placed.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12), name


def test_a_parameter_replaced_while_its_block_runs(tmp_path: Path) -> None:
    class Faster(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.up, {"weight": 2 * self.up.weight}, (x,))

    placed = place(nn.Sequential(Faster(2)), {"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(ConfigurationError, match=r"weight of a Linear was replaced while 0 was running"):
        placed(torch.ones(1, 2))


def test_running_a_placed_model_does_not_import_the_compiler(tmp_path: Path) -> None:
    program = (
        "import sys, torch, rankwise\n"
        "model = rankwise.place(torch.nn.Linear(2, 2), {'': 'disk'}, offload_folder=sys.argv[1])\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


@pytest.mark.parametrize("plan", ["cpu", "disk"])
def test_a_model_is_freed_with_its_last_name(plan: str, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = place(_net(), {"": plan}, offload_folder=tmp_path)
        _step(model, 0)
        left = weakref.ref(model)
        del model
        assert left() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()


def test_a_weight_changed_before_backward_is_noticed(tmp_path: Path) -> None:
    model = place(_tower(2), {"": "disk"}, offload_folder=tmp_path)
    loss = model(torch.randn(4, 20, dtype=torch.float64, requires_grad=True)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RankwiseError, match="changed in place between forward and backward"):
        loss.backward()


def test_a_copy_is_a_plain_model(tmp_path: Path) -> None:
    model = place(_tower(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - of our own
        with torch.no_grad():
            model[0].weight.mul_(1)
            copied[0].weight.mul_(2)
            assert torch.allclose(copied(x), 2 * expected)
        assert torch.equal(model(x), expected)
        place(copied, {"": "cpu"})


def test_layers_on_different_devices_meet() -> None:
    """The only second device of a machine without GPUs holds shapes and no numbers."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))
            self.down = nn.Linear(4, 4)
            self.deep = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.up = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            skip = self.down(x) + self.bias
            deep = self.deep(skip) * scale
            back = self.up(torch.cat([skip, deep], dim=1))
            back += skip[:, :3]
            torch.add(self.down(x).detach(), 1, out=torch.empty_like(deep))
            return {"skip": skip, "deep": deep, "back": back}

    model = Skip()
    model.deep.to("meta")
    model.up.to("meta")
    place(model, {"": "meta", "down": "cpu", "bias": "cpu"})
    output = model(torch.ones(2, 4), scale=torch.ones(2, 1))
    assert {name: (str(tensor.device), tuple(tensor.shape)) for name, tensor in output.items()} == {
        "skip": ("cpu", (2, 4)), "deep": ("meta", (2, 4)), "back": ("meta", (2, 3)),
    }  # fmt: skip


def _unchanged(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not folder.exists() or list(folder.iterdir()) == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": ({"plan": {"": "cpu", "block.1": "disk"}}, r"names 'block\.1'.*\n.*near it: blocks\.1"),
    "a split block": (
        {"plan": {"": "cpu", "blocks.1.up": "disk"}},
        r"splits blocks\.1, which stays whole: Block is one of the blocks of blocks",
    ),
    "a split layer": ({"plan": {"": "cpu", "head.bias": "disk"}}, "splits head, .*: Linear is a single layer"),
    "not covered": ({"plan": {"blocks": "cpu"}}, r"nothing about \d+ parameters(.*\n)+.*shift"),
    "no such device": ({"plan": {"": "cuda:9"}}, "no device 'cuda:9'"),
    "no plan": ({"plan": 3}, "plan= is a int"),
    "a number for a name": ({"plan": {0: "cpu"}}, "names 0, and Net has no such module"),
    "a second name": ({"plan": {"": "cpu", "again": "disk"}}, r"'again', which is another name of 'blocks\.2'"),
    "inside a second name": ({"plan": {"": "cpu", "again.up.bias": "cpu"}}, r"another name of 'blocks\.2\.up\.bias'"),
    "values thrown away": (
        {"plan": {"": "cpu", "head": "meta", "lstm": "meta"}},
        r"throw away the values of 5 tensors",
    ),
    "another accelerator": ({"plan": {"": "xpu:0"}}, "no device 'xpu:0'"),
    "an accelerator of a laptop": ({"budgets": {"mps": "1GB"}}, "no device 'mps'"),
    "budgets in a list": ({"budgets": ["cpu"]}, "budgets= is a list"),
    "a folder that is a number": ({"offload_folder": 3}, "offload_folder=3 is no path"),
    "files that are a number": ({"checkpoint": 3}, "checkpoint=3 is no path"),
    "no policy": ({"plan": "balance"}, r"no policy 'balance'(.*\n)+.*balanced"),
    "no devices": ({"plan": "auto", "budgets": {}, "offload_folder": None}, "no device with any room"),
    "no amount": ({"budgets": {"cpu": "much"}}, "no amount of memory"),
    "too large a layer": ({"budgets": {"cpu": 2000}}, "more than every budget allows"),
    "too large a model": (
        {"budgets": {"cpu": 6000}, "offload_folder": None},
        r"more than all devices have room for(.*\n)+.*offload_folder",
    ),
    "over a budget by hand": ({"plan": {"": "cpu"}, "budgets": {"cpu": 4000}}, "puts more on cpu"),
    "no folder": ({"plan": {"": "disk"}, "offload_folder": None}, "no folder"),
    "keep_whole": ({"keep_whole": ["blocks.7"]}, r"no module named 'blocks\.7'"),
    "keep_whole of one name": ({"keep_whole": "blocks.7"}, r"no module named 'blocks\.7'"),
    "no files": ({"checkpoint": "/nowhere"}, "nothing at /nowhere"),
    "int8 of float64": ({"int8": True}, "int8=True takes a model in float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str, tmp_path: Path) -> None:
    options, message = REFUSED[name]
    model = _net()
    model.again = model.blocks[2]
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigurationError, match=message):
        place(model, **{"offload_folder": tmp_path / "offload"} | options)
    _unchanged(model, state, tmp_path / "offload")


def test_placing_twice_and_what_is_not_placed() -> None:
    model = _tower()
    with pytest.raises(ConfigurationError, match="that is not placed"):
        placement(model)
    place(model, {"": "cpu"})
    with pytest.raises(ConfigurationError, match="placed already"):
        place(nn.Sequential(model), {"": "cpu"})
    with pytest.raises(ConfigurationError, match="placed already"):
        place(model[0], {"": "cpu"})
    for what, words in ((3, "a int"), (nn.Linear, "the class Linear")):
        with pytest.raises(ConfigurationError, match=f"given {words}, which is no model"):
            place(what)
    with pytest.raises(ConfigurationError, match="has no shape yet"):
        place(nn.Sequential(nn.LazyLinear(3)))


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(100, 100))
    state = copy.deepcopy(model.state_dict())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match="has no room for 39"):
            place(model, {"": "disk"}, offload_folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _unchanged(model, state, tmp_path)


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_checkpoint_goes_straight_into_place(on_meta: bool, tmp_path: Path) -> None:
    one, file = _net(), tmp_path / "model.safetensors"
    one.train()(_batch(0)[0])
    # Tied names stand in files once, as transformers writes them.
    save_file({key: tensor for key, tensor in one.state_dict().items() if key != "head.weight"}, file)
    content = file.read_bytes()
    with torch.device("meta" if on_meta else "cpu"):
        model = Net().double()
    parameters = list(model.parameters())
    place(model, {"": "cpu", "blocks": "disk"}, checkpoint=file, offload_folder=tmp_path / "offload")
    assert _difference(model, one) == 0.0
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in parameters]
    assert model.head.weight is model.embed.weight
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    _step(model, 1)
    optimizer.step()
    assert file.read_bytes() == content
    assert _difference(model, one) > 0.0


def test_a_checkpoint_of_something_else(tmp_path: Path) -> None:
    state = _net().state_dict()
    wrong = {key: tensor for key, tensor in state.items() if key not in {"shift", "head.weight", "embed.weight"}}
    wrong |= {"shifts": torch.zeros(6), "lstm.bias_hh_l0": torch.zeros(5)}
    wrong["blocks.1.up.bias"] = torch.zeros(12, dtype=torch.int64)
    save_file(wrong, tmp_path / "wrong.safetensors")
    model = _net()
    with pytest.raises(CheckpointError) as caught:
        place(model, {"": "disk"}, checkpoint=tmp_path / "wrong.safetensors", offload_folder=tmp_path / "offload")
    text = str(caught.value)
    for line in (
        "missing: shift (near it: shifts)",
        "missing: embed.weight",
        "unexpected: shifts",
        "lstm.bias_hh_l0: [5] in the file, [24] in the model",
        "blocks.1.up.bias: torch.int64 in the file, torch.float64 in the model",
    ):
        assert line in text
    _unchanged(model, state, tmp_path / "offload")


def test_a_checkpoint_that_would_lose_values(tmp_path: Path) -> None:
    """Whole numbers are not converted, and of tied weights no other than the one in the model is dropped."""
    model = _net()
    state = copy.deepcopy(model.state_dict())
    untied = state | {"head.weight": state["head.weight"] + 1}
    for wrong, words in (
        (state | {"blocks.0.norm.num_batches_tracked": torch.tensor(300, dtype=torch.int32)}, r"int32 in the file"),
        (untied, r"embed\.weight and head\.weight differ in the file, and are one tensor in the model"),
    ):
        save_file({key: value.clone() for key, value in wrong.items()}, tmp_path / "wrong.safetensors")
        with pytest.raises(CheckpointError, match=words):
            place(model, {"": "cpu"}, checkpoint=tmp_path / "wrong.safetensors")
        _unchanged(model, state, tmp_path / "offload")
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "right.safetensors")
    place(model, {"": "cpu"}, checkpoint=tmp_path / "right.safetensors")


def test_a_parameter_that_something_holds_on_to(tmp_path: Path) -> None:
    save_file(_tower(3).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = _tower(3)
    held = weakref.ref(model[1].weight)
    with pytest.raises(ConfigurationError, match=r"1\.weight cannot be given values"):
        place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert all(parameter.is_meta for parameter in model.parameters())
    del held
    place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert _difference(model, _tower(3)) == 0.0


def test_a_model_without_values() -> None:
    with torch.device("meta"):
        model = _tower()
    with pytest.raises(ConfigurationError, match="6 parameters are on the meta device"):
        place(model, {"": "cpu"})


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=3, hidden_size=8, intermediate_size=12, vocab_size=11, num_attention_heads=2,
            num_key_value_heads=1, use_cache=False,
        )
    )  # fmt: skip


def test_a_transformer_from_its_own_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = _llama()
    one.save_pretrained(tmp_path, max_shard_size="3KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        model = _llama()
    place(model, "auto", budgets={"cpu": "6KB"}, checkpoint=tmp_path, offload_folder=tmp_path / "offload")
    assert {part.device for part in placement(model).parts} == {"cpu", "disk"}
    tokens = torch.randint(11, (2, 5))
    for model_ in (one, model):
        model_(input_ids=tokens, labels=tokens).loss.backward()
    for (name, left), right in zip(model.named_parameters(), one.named_parameters(), strict=True):
        assert torch.equal(left.grad, right[1].grad), name
    generated = [m.eval().generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0) for m in (one, model)]
    assert torch.equal(*generated)


def test_buffers_that_no_file_holds(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    save_file(nn.Sequential(Scaled()).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(ConfigurationError, match=r"no values(.*\n)+.*0\.scale(.*\n)+.*model\.0 = Scaled"):
        place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    model[0].scale = torch.full((2,), 3.0)
    place(model, {"": "cpu"}, checkpoint=tmp_path / "model.safetensors")
    assert model[0].scale.tolist() == [3.0, 3.0]
    assert not model[0].linear.weight.is_meta


def test_8_bit_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16), nn.Linear(16, 4)).eval()
    save_file(one.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(5, 32)
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = copy.deepcopy(one) if not on_meta else copy.deepcopy(one).to("meta")
        options = {"checkpoint": tmp_path / "model.safetensors"} if on_meta else {}
        place(model, {"": "disk", "0": "cpu"}, int8=True, offload_folder=tmp_path / "offload", **options)
        assert model.state_dict().keys() == one.state_dict().keys()
        part = placement(model).parts[0]
        assert part.num_bytes < sum(p.nbytes for p in one[0].parameters()) / 2.5
        with torch.no_grad():
            output = model(x)
            assert (output - one(x)).abs().max() < 0.02 * one(x).abs().max()
            assert not torch.equal(output, one(x))
        assert torch.equal(model(x), output)
        for untrained in (model, copy.deepcopy(model).train()):
            assert not untrained(x).requires_grad
        with pytest.raises(ConfigurationError, match="8-bit weights, which cannot be trained"):
            model.train()(x)
    assert caplog.records == []
