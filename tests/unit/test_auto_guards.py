# SPDX-License-Identifier: Apache-2.0
"""What a call of a module may read is compared before every call: what a script changes is named, and nothing else."""

from __future__ import annotations

import argparse
import copy
import cProfile
import functools
import logging
import pickle
import random
import sys
import types
import warnings
from collections import Counter, UserDict, deque
from contextlib import nullcontext
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as scripts write
from torch.nn.utils import prune

from rankwise.auto.code_reads import noted_functions
from rankwise.auto.guards import Guard
from rankwise.auto.settings import AppliedSettings, settings

if TYPE_CHECKING:
    from collections.abc import Callable

scale = 1.0
rate: float
last: object
TABLE = np.ones(4)
FIXED = np.ones(2**22)
FIXED.flags.writeable = False
DRAWS = random.Random(0)
ARRAYS = np.random.default_rng(0)
NUMBERS = torch.Generator().manual_seed(0)
COUNTS: Counter[str] = Counter()
LOG = StringIO()
logger = logging.getLogger(__name__)
args = argparse.Namespace(alpha=1.0, lr=0.1)
step = 0
total = 0
"""Globals that forward does not read, though it has attributes of these names."""
flags = types.ModuleType(__name__ + "_flags")
flags.alpha = 1.0  # type: ignore[attr-defined]
flags.__file__ = __file__


class Weird:
    """Has a ``==`` that must not be called."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    __hash__ = None  # type: ignore[assignment]


WEIRD = Weird()


@dataclass(slots=True)
class Slots:
    alpha: float = 1.0


@dataclass
class Item:
    weight: float = 1.0


class Schedule:
    factor = 1.0

    def __init__(self) -> None:
        self.hidden = [1.0]

    @property
    def value(self) -> float:
        return self.hidden[0] * offset()


def offset() -> float:
    return FACTOR[0]


FACTOR = [1.0]
SCHEDULE = Schedule()


def activation(x: torch.Tensor, *, slope: float = 1.0) -> torch.Tensor:
    return F.leaky_relu(x, slope)


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


COUNT = counter()


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.items = [Item(), Item()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.items[1].weight


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low, self.high = nn.Linear(4, 1), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.high(self.low(x))


class Gains(nn.Module):
    gain = 1.0


class Net(Gains):
    factor = 1.0
    seen: list[int] = []  # noqa: RUF012 - as scripts have them

    def __init__(self, read: Callable[..., Any] = lambda _: 1.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.register_buffer("mask", torch.ones(4))
        self.settings = {"alpha": 1.0, "deep": {"beta": [2.0]}}
        self.words = {"one", "two"}
        self.user = UserDict(a=1)
        self.queue = deque([torch.zeros(2)])
        self.slots = Slots()
        self.temperature = 1.0
        self.read = read
        self.total = 0.0
        self.weird = WEIRD
        self.step = 0
        self.unknown = float("nan")
        self.history: list[float] = []
        vars(self)["itself"] = self  # not as a part
        self.layers[0].register_forward_hook(lambda *_: None)
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.total > 1:
            # A branch that no test takes.
            self.features = x
            return (
                x
                * SCHEDULE.value
                * len(
                    (self.words, self.user, self.settings, self.unknown, self.queue, self.slots, self.weird, self.seen)
                )
            )
        return self.hidden[0](activation(self.layers(x))) * self.read(self) * self.temperature + self.step * self.factor


def _set_global(name: str, value: object) -> None:
    globals()[name] = value


def read_new_global(_: Net) -> float:
    global last  # noqa: PLW0603 - as scripts do
    last = 1
    return 1.0


def read_print(_: Net) -> float:
    LOG.write("")
    logger.debug("one")
    return 1.0


@functools.cache
def cached(value: float) -> float:
    return value * FACTOR[0]


@torch.no_grad()
def wrapped(_: Net) -> float:
    return scale


def read_cached(_: Net) -> float:
    return cached(1.0)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * FACTOR[0]


CASES: dict[str, tuple[Callable[..., Any], Callable[[Net], Any], str]] = {
    "schedule": (lambda _: scale, lambda _: _set_global("scale", 0.5), "the global scale"),
    "behind a decorator": (wrapped, lambda _: _set_global("scale", 0.5), "the global scale"),
    "in a comprehension": (
        lambda _: sum(scale for _ in range(2)),
        lambda _: _set_global("scale", 0.5),
        "the global scale",
    ),
    "partial": (
        functools.partial(lambda _, table: table[0], table=TABLE),
        lambda _: TABLE.fill(3),
        ".read.keywords['table']",
    ),
    "closure": (lambda _: COUNT(), lambda _: COUNT(), "the global COUNT and its calls"),
    "default": (
        lambda _: 1.0,
        lambda _: activation.__kwdefaults__.update(slope=0.5),
        "a default of the global activation['slope']",
    ),
    "defaults replaced": (
        lambda _: 1.0,
        lambda _: setattr(activation, "__kwdefaults__", {"slope": 0.5}),
        "a default of the global activation['slope']",
    ),
    "class attribute": (lambda _: 1.0, lambda _: setattr(Net, "factor", 2.0), "Net.factor"),
    "inherited attribute": (lambda net: net.gain, lambda _: setattr(Net, "gain", 2.0), "Net.gain"),
    "list of the class": (lambda _: 1.0, lambda net: net.seen.append(1), "Net.seen"),
    "monkeypatched": (lambda _: 1.0, lambda _: _set_global("activation", lambda x: x), "the global activation"),
    "monkeypatched method": (lambda _: 1.0, lambda _: setattr(Net, "forward", lambda _, x: x), "Net.forward"),
    "monkeypatched layer": (lambda _: 1.0, lambda _: setattr(nn.ReLU, "forward", lambda _, x: x), "ReLU.forward"),
    "of a layer of torch": (
        lambda _: 1.0,
        lambda _: setattr(F, "batch_norm", len),
        "the global batch_norm of torch.nn.functional",
    ),
    "torch function": (
        lambda _: 1.0,
        lambda _: setattr(F, "leaky_relu", F.relu),
        "the global leaky_relu of torch.nn.functional",
    ),
    "item in a submodule's list": (
        lambda _: 1.0,
        lambda net: setattr(net.layers[0].items[1], "weight", 2.0),
        "layers.0.items[1].weight",
    ),
    "settings": (lambda net: net.settings["alpha"], lambda net: net.settings.update(alpha=2.0), ".settings['alpha']"),
    "deep settings": (
        lambda _: 1.0,
        lambda net: net.settings["deep"]["beta"].append(1),  # type: ignore[index]
        ".settings['deep']['beta']",
    ),
    "set": (lambda _: 1.0, lambda net: net.words.add("three"), ".words"),
    "user's dictionary": (lambda _: 1.0, lambda net: net.user.update(a=2), ".user.data['a']"),
    "slots": (lambda _: 1.0, lambda net: setattr(net.slots, "alpha", 2.0), ".slots.alpha"),
    "arguments": (lambda _: args.alpha, lambda _: setattr(args, "alpha", 2.0), "the global args.alpha"),
    "module": (lambda _: flags.alpha, lambda _: setattr(flags, "alpha", 2.0), "the global alpha of " + flags.__name__),
    "array": (lambda _: TABLE[0], lambda _: TABLE.__setitem__(2, 5.0), "the global TABLE"),
    "generator": (lambda _: DRAWS.random(), lambda _: DRAWS.random(), "the global DRAWS"),
    "NumPy's generator": (lambda _: ARRAYS.random(), lambda _: ARRAYS.random(), "the global ARRAYS"),
    "torch's generator": (lambda _: NUMBERS, lambda _: torch.rand(2, generator=NUMBERS), "the global NUMBERS"),
    "counts": (lambda _: COUNTS["x"], lambda _: COUNTS.update(["x"]), "the global COUNTS"),
    "untaken branch": (lambda _: 1.0, lambda _: FACTOR.append(2.0), "the global FACTOR"),
    "property's object": (lambda _: 1.0, lambda _: SCHEDULE.hidden.append(2.0), "the global SCHEDULE.hidden"),
    "cached function": (read_cached, lambda _: FACTOR.__setitem__(0, 3.0), "the global FACTOR[0]"),
    "custom function": (Times.apply, lambda _: _set_global("scale", 3.0), "the global scale"),
    "tensor in a queue": (lambda _: 1.0, lambda net: net.queue[0].add_(1), ".queue[0]"),
    "weird": (lambda _: 1.0, lambda net: setattr(net.weird, "x", 1), ".weird.x"),
    "global that is made": (read_new_global, read_new_global, "the global last"),
    "written text": (read_print, lambda _: LOG.write("x"), "the global LOG"),
    "features": (lambda _: 1.0, lambda net: setattr(net, "features", torch.ones(2)), ".features"),
    "replaced attribute": (lambda _: 1.0, lambda net: setattr(net, "temperature", 0.5), ".temperature"),
    "type of a number": (lambda _: 1.0, lambda net: setattr(net, "temperature", 1), ".temperature"),
    "removed attribute": (lambda _: 1.0, lambda net: delattr(net, "temperature"), ".temperature"),
    "renamed key": (
        lambda _: 1.0,
        lambda net: net.settings.update(other=net.settings.pop("deep")),
        ".settings['other']",
    ),
    "hook": (lambda _: 1.0, lambda net: net.layers[3].register_forward_hook(lambda *_: None), "a hook of layers.3"),
    "hook before": (lambda _: 1.0, lambda net: net.register_forward_pre_hook(lambda *_: None), "a hook of Net"),
    "hook of all": (
        lambda _: 1.0,
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
        "the global _global_forward_hooks of torch.nn.modules.module",
    ),
    "hooks cleared": (lambda _: 1.0, lambda net: setattr(net.layers[0], "_forward_hooks", {}), "a hook of layers.0"),
    "layer replaced": (lambda _: 1.0, lambda net: net.layers.__setitem__(1, nn.GELU()), "layers.1"),
    "LoRA": (lambda _: 1.0, lambda net: setattr(net.layers, "3", Lora(net.layers[3])), "layers.3"),
    "forward replaced": (lambda _: 1.0, lambda net: setattr(net.layers[3], "forward", lambda x: x), "layers.3.forward"),
    "forward of Net replaced": (lambda _: 1.0, lambda net: setattr(net, "forward", lambda x: x), ".forward"),
    "layer added": (lambda _: 1.0, lambda net: net.layers.append(nn.GELU()), "layers.4"),
    "class replaced": (
        lambda _: 1.0,
        lambda net: setattr(net.layers[0], "__class__", nn.Linear),
        "the class of layers.0",
    ),
    "state assigned": (
        lambda _: 1.0,
        lambda net: net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
        ".mask",
    ),
    "half": (lambda _: 1.0, lambda net: net.half(), ".mask"),
    "dtype": (lambda _: 1.0, lambda net: net.layers[3].bfloat16(), "layers.3.weight"),
    "shape": (lambda _: 1.0, lambda net: setattr(net.layers[3].weight, "data", torch.ones(2, 8)), "layers.3.weight"),
    "frozen": (lambda _: 1.0, lambda net: net.layers[3].requires_grad_(False), "layers.3.weight"),
    "pruned": (lambda _: 1.0, lambda net: prune.l1_unstructured(net.layers[3], "weight", 0.5), "layers.3.weight_orig"),
    "mode": (lambda _: 1.0, lambda net: net.eval(), ".training"),
    "mode of a part": (lambda _: 1.0, lambda net: net.layers[2].eval(), "layers.2.training"),
    "hidden layer": (lambda _: 1.0, lambda net: nn.init.ones_(net.hidden[0].bias), ".hidden[0]._parameters['bias']"),
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Undo what a test changes."""
    before, of_net = dict(globals()), dict(vars(Net))
    contents = {id(one): (one, list(one)) for one in (FACTOR, SCHEDULE.hidden, Net.seen)}
    functions = [(F, "leaky_relu"), (F, "batch_norm"), (nn.ReLU, "forward")]
    old = [getattr(*one) for one in functions]
    monkeypatch.setitem(sys.modules, flags.__name__, flags)
    yield
    for key in [key for key in globals() if key not in before]:
        del globals()[key]
    globals().update(before)
    for one, content in contents.values():
        one[:] = content
    for key in ("factor", "forward"):
        setattr(Net, key, of_net[key])
    for (owner, key), value in zip(functions, old, strict=True):
        setattr(owner, key, value)
    TABLE.fill(1)
    COUNTS.clear()
    args.alpha = flags.alpha = 1.0  # type: ignore[attr-defined]
    vars(WEIRD).clear()
    if "gain" in vars(Net):
        del Net.gain
    if hasattr(nn.Linear, "extra"):
        del nn.Linear.extra
    activation.__kwdefaults__ = {"slope": 1.0}
    nn.modules.module._global_forward_hooks.clear()


@pytest.mark.parametrize(("read", "change", "name"), CASES.values(), ids=CASES)
def test_a_change_is_named(read: Callable[..., Any], change: Callable[[Net], Any], name: str) -> None:
    net = Net(read)
    guard = Guard(net)
    assert guard.obstacle is None
    assert guard.changed() is None
    guard.add({})
    assert guard.changed() is None
    change(net)
    assert guard.changed() == name
    assert guard.changed() == name, "it stays changed"
    assert Guard(net).changed() is None


class Loop:
    """An ordinary training loop, whose names are globals of a script."""

    def __init__(self, model: nn.Module, ema: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.loader = torch.utils.data.DataLoader(list(torch.randn(16, 4)), batch_size=4)
        self.ema = ema
        self.metrics: dict[str, list[float]] = {"loss": []}

    def run(self, num_steps: int, check: Callable[[], object]) -> None:
        global step, total, last
        while step < num_steps:
            for last in self.loader:
                check()
                self.optimizer.zero_grad()
                loss = self.model(last).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.metrics["loss"].append(loss.item())
                with torch.no_grad():
                    for one in self.ema.parameters():
                        one.mul_(0.9)
                step, total = step + 1, total + loss.item()
                self.model.temperature = float(str(self.model.temperature))  # another object, which is equal
                args.lr *= 0.9


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pruning", [False, True])
def test_an_ordinary_loop_changes_nothing(*, pruning: bool) -> None:
    net = Net()
    loop = Loop(net, Net())
    if pruning:
        prune.random_unstructured(net.layers[3], "weight", 0.5)
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(net.layers[0])
    guard = Guard(net)
    found: list[str | None] = []
    loop.run(100, lambda: found.append(guard.changed()))
    assert found == [None] * 100


UNREAD: dict[str, Callable[[Net], Any]] = {
    "global": lambda _: _set_global("step", 5),
    "attribute of an object": lambda _: setattr(args, "lr", 2.0),
    "attribute that no code names": lambda net: setattr(net, "best", 1.0),
    "changed attribute": lambda net: net.history.append(1.0),
    "equal object": lambda net: setattr(net, "slots", Slots()),
    "equal object of weird class": lambda net: setattr(net, "weird", Weird()),
    "equal settings": lambda net: setattr(net, "settings", copy.deepcopy(net.settings)),
    "equal number": lambda net: setattr(net, "temperature", float("1.0")),
    "equal to no number": lambda net: setattr(net, "unknown", float("nan")),
    "values of parameters": lambda net: nn.init.zeros_(net.layers[3].weight),
    "values of buffers": lambda net: net.mask.zero_(),
    "class that is not used": lambda _: setattr(nn.Linear, "extra", 1),
}


@pytest.mark.parametrize("change", UNREAD.values(), ids=UNREAD)
def test_what_no_code_reads_may_change(change: Callable[[Net], Any]) -> None:
    net = Net()
    guard = Guard(net)
    change(net)
    assert guard.changed() is None
    assert guard.changed() is None


def test_an_attribute_may_be_read_by_any_name() -> None:
    net = Net(lambda net: getattr(net, "yrotsih"[::-1]) or 1.0)
    guard = Guard(net)
    net.history.append(1.0)
    assert guard.changed() == ".history"


def test_code_of_a_library_is_followed_once_it_has_run() -> None:
    library = types.ModuleType("library")
    sys.modules["library"] = library
    text = """
def make():
    own = [1.0]
    def inner(x):
        return x * alpha * own[0]
    return inner, own
alpha, unused = 1.0, 1.0
inner, own = make()
functions = {"inner": inner}
class Holder:
    def __init__(self):
        self.inner, self.own = make()
    def __reduce__(self):
        return Holder, ()
holder = Holder()
def call(x):
    return functions["inner"](x) * holder.inner(x)
"""
    exec(text, vars(library))  # noqa: S102 - the test's own text
    net = Net(lambda _: library.call(1.0))
    guard = Guard(net)
    library.alpha = 2.0  # type: ignore[attr-defined]
    assert guard.changed() is None
    with noted_functions() as ran:
        net(torch.zeros(2, 4))
    codes = {code.co_name for code, _ in ran.values()}
    assert {"forward", "activation", "call", "inner"} <= codes
    assert not any(names["__name__"].startswith("torch") for _, names in ran.values())
    guard.add(ran)
    assert guard.changed() is None
    library.unused = 2.0  # type: ignore[attr-defined]
    assert guard.changed() is None
    library.own.append(1.0)
    assert guard.changed() == "the global functions of library['inner'] and its own"
    guard = Guard(net)
    guard.add(ran)
    library.holder.own.append(1.0)
    assert guard.changed() == "make.<locals>.inner and its own"
    guard = Guard(net)
    guard.add(ran)
    library.alpha = 3.0  # type: ignore[attr-defined]
    assert guard.changed() == "the global alpha of library"
    del sys.modules["library"]


def test_what_a_call_changes_is_named_though_code_is_added() -> None:
    net = Net(lambda net: net.settings.update(alpha=3.0) or 1.0)
    guard = Guard(net)
    with noted_functions() as ran:
        net(torch.zeros(2, 4))
    guard.add(ran)
    assert guard.changed() == ".settings['alpha']"


def test_a_profiler_goes_on_after_functions_were_noted() -> None:
    profile = cProfile.Profile()
    seen: list[str] = []

    def own(frame: types.FrameType, event: str, _: object) -> None:
        seen.append(f"{event} {frame.f_code.co_name}")

    with profile if sys.version_info < (3, 12) else nullcontext():
        before = sys.getprofile()
        with noted_functions() as ran:
            offset()
        assert sys.getprofile() is before
        counter()
    if sys.version_info < (3, 12):
        assert any(entry.code is counter.__code__ for entry in profile.getstats())
    sys.setprofile(own)
    try:
        with noted_functions():
            offset()
        counter()
    finally:
        sys.setprofile(None)
    assert [code.co_name for code, _ in ran.values()] == ["offset"]
    assert "call counter" in seen
    assert "call offset" not in seen


def test_what_cannot_be_compared_is_an_obstacle() -> None:
    words = "it may read more of {} than can be compared at every call"
    net = Net()
    net.table = np.ones(2**20)  # type: ignore[assignment]
    net.history = [{} for _ in range(20_000)]  # type: ignore[assignment]
    net.fixed = FIXED  # type: ignore[assignment]
    assert Guard(net).obstacle is None, "no code names these"
    net.read = lambda net: getattr(net, "table")  # noqa: B009 - a name that a string holds
    assert Guard(net).obstacle == words.format(".table")
    net.read = lambda net: len(net.history)
    assert Guard(net).obstacle == words.format(".history")
    net.read = lambda net: net.fixed
    assert Guard(net).obstacle is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of some versions of torch: torch.jit is deprecated
        net.layers[1] = torch.jit.script(nn.ReLU())
    assert Guard(net).obstacle == "layers.1 is compiled by torch.jit"


def test_settings_travel() -> None:
    torch.set_float32_matmul_precision("highest")
    before = settings()
    assert before == settings()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        there = settings()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    assert settings() == before != there
    server = AppliedSettings()
    with server.applied(pickle.loads(pickle.dumps(there))):  # noqa: S301 - its own
        assert settings() == there
        assert torch.ones(1).device.type == "meta"
    with server.applied(before):
        assert settings() == before
    with torch.inference_mode():
        there = settings()
    with server.applied(there):
        assert settings() == there
        assert torch.ones(1).is_inference()
    assert settings() == before
