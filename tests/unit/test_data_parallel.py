# SPDX-License-Identifier: Apache-2.0
"""A batch split over devices of one process gives what one device gives."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.parallel.data_parallel import data_parallel
from rankwise.parallel.place.place import place

TWO = ["cpu", "cpu"]
THREE = ["cpu", "cpu", "cpu"]


class Net(nn.Module):
    """Tied layers, BatchNorm, keyword arguments, and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.last = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(3)
        self.threads: set[str] = set()

    def forward(
        self, x: torch.Tensor, *, target: torch.Tensor, scale: torch.Tensor, norm: bool = False
    ) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        hidden = torch.tanh(self.tied(torch.tanh(self.second(torch.tanh(self.first(x))))))
        logits = self.last(hidden) * scale.sum()
        if norm:
            logits = self.norm(logits)
        loss = (logits - target).square().mean()
        return {"loss": loss, "logits": logits, "both": (hidden, [logits.flatten()]), "words": "the same", "none": None}


def built() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(size, width, generator=generator).double() for name, width in (("x", 6), ("target", 3))}
    return {**values, "scale": torch.full((17,), 0.05, dtype=torch.float64)}


def trained(model: Net, sizes: list[int]) -> tuple[dict[str, torch.Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    output: Any = None
    for size in sizes:
        values = batch(size)
        output = model(values.pop("x"), **values)
        (output["loss"] + output["both"][0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), output


@pytest.mark.parametrize("devices", [TWO, THREE])
def test_training_equals_one_device_also_where_parts_are_uneven_or_empty(devices: list[str]) -> None:
    sizes = [7, 8, 2, 1]
    expected, expected_output = trained(built(), sizes)
    model = built()
    assert data_parallel(model, devices) is model
    got, output = trained(model, sizes)
    assert list(got) == list(expected), "the keys are the model's own"
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-10, atol=1e-14), name
    assert output.keys() == expected_output.keys()
    for name in ("loss", "logits"):
        assert output[name].shape == expected_output[name].shape
        assert torch.allclose(output[name], expected_output[name], rtol=1e-10, atol=1e-14)
    assert torch.allclose(output["both"][1][0], expected_output["both"][1][0], rtol=1e-10, atol=1e-14)
    assert output["words"] == "the same"
    assert len(model.threads) > 1, "parts run in threads"


def test_modes_of_the_calling_thread_apply_to_every_part() -> None:
    seen: list[tuple[bool, bool, torch.dtype]] = []

    class Looking(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), super().forward(input).dtype))
            return super().forward(input)

    model = data_parallel(Looking(4, 4), THREE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(5, 4))
    with torch.inference_mode():
        model(torch.ones(5, 4))
    assert seen == [(False, False, torch.bfloat16)] * 3 + [(False, True, torch.float32)] * 3


def test_running_statistics_are_those_of_the_first_part_as_in_torch() -> None:
    expected, model = built(), data_parallel(built(), TWO)
    values = batch(8)
    x = values.pop("x")
    model(x, **values, norm=True)
    expected(x[:4], target=values["target"][:4], scale=values["scale"], norm=True)
    assert torch.equal(model.norm.running_mean, expected.norm.running_mean)
    assert model.norm.num_batches_tracked == 1


def test_a_copy_and_a_pickle_are_plain_models() -> None:
    model = data_parallel(nn.Linear(3, 2), TWO)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        assert type(plain.forward).__name__ == "method"
        assert plain.forward.__self__ is plain
        assert plain.weight is not model.weight
        assert torch.allclose(plain(torch.ones(5, 3)), model(torch.ones(5, 3)))
        assert type(data_parallel(plain, TWO).forward).__name__ == "_Spread", "and may be spread again"


def test_a_model_that_goes_frees_its_memory_at_once() -> None:
    model = data_parallel(nn.Linear(3, 2), TWO)
    model(torch.ones(5, 3)).sum().backward()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_an_error_in_a_part_is_the_callers() -> None:
    class Failing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's own name
            if input.sum() > 3:
                message = "the second part is bad"
                raise ValueError(message)
            return super().forward(input)

    model = data_parallel(Failing(2, 2), TWO)
    with pytest.raises(ValueError, match="the second part is bad"):
        model(torch.arange(4.0).view(2, 2))


def test_it_says_what_it_costs_and_what_would_be_better(caplog: pytest.LogCaptureFixture) -> None:
    data_parallel(nn.Linear(2, 2), TWO)
    assert "copies the model" in caplog.text
    assert "rankwise.replicate" in caplog.text


def test_with_one_device_the_model_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rankwise")
    model = nn.Linear(2, 2)
    assert data_parallel(model) is model
    assert "forward" not in vars(model)
    assert "one device, cpu" in caplog.text


class Returning(nn.Module):
    """Returns what a function makes of its argument."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x.t(), "The first dimension of an output"),
        (lambda x: x.shape[0], "different parts of a batch"),
        (lambda x: {str(len(x)): x}, "different parts of a batch"),
        (Returning, "cannot concatenate the Returning"),
    ],
)
def test_outputs_that_cannot_be_put_together_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        data_parallel(Returning(make), TWO)(torch.ones(5, 2))


def test_wrong_arguments_say_what_to_do() -> None:
    for devices, words in (
        (["cpu", "cuda:0"], "1 kind|one type|has 0 GPUs"),
        (["cpu:x"], "unknown device"),
        ([], "one type"),
        (["meta", "meta"], "move it first"),
        ("cpu", "must be a list"),
        (2, "must be a list"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            data_parallel(nn.Linear(2, 2), devices)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn.Module"):
        data_parallel(3)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="cannot be combined with place"):
        data_parallel(place(nn.Linear(2, 2), {"": "cpu"}), TWO)
    with pytest.raises(ConfigurationError, match="already replaced"):
        data_parallel(data_parallel(nn.Linear(2, 2), TWO), TWO)
    with pytest.raises(ConfigurationError, match="found no batch"):
        data_parallel(nn.Linear(2, 2), TWO)(3)


def test_one_of_several_ranks_is_refused_before_it_has_joined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=r"one of 2 ranks(.*\n)+.*RANK=1(.*\n)+.*replicate.* after .*join"):
        data_parallel(built(), TWO)
    # Exported for other libraries: join() would refuse it, but nothing says that there are several ranks.
    monkeypatch.delenv("RANK")
    model = data_parallel(built(), TWO)
    assert model(**batch(4))["loss"].isfinite()
