# SPDX-License-Identifier: Apache-2.0
"""Which torch rankwise accepts: importing it refuses one that is too old, and warns of one that is too new."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import rankwise
from rankwise.errors import TorchTooOld, UntestedTorch
from rankwise.pipeline.schedule import schedule_of
from rankwise.torch_private.autograd import BACKWARD_OF_INPUTS
from rankwise.world import torch_versions
from tests.refusals import is_refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    # What is patched is the string that torch itself would have.
    assert torch_versions.installed() == torch.__version__
    return monkeypatch


@pytest.mark.parametrize("version", ["2.8.0", "2.8.1+cu126", "1.13.1", "2.8.0a0+git1"])
def test_too_old_is_refused_with_what_to_install(told: pytest.MonkeyPatch, version: str) -> None:
    told.setattr("torch.__version__", version)
    with pytest.raises(TorchTooOld) as caught:
        torch_versions.check()
    assert version in str(caught.value)
    assert "needs torch 2.9 or newer" in str(caught.value)
    assert f"pip install '{torch_versions.requirement()}'" in str(caught.value)
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("version", ["2.16.0", "3.0.1+cu140", "2.16.0.dev20261101", "2.15.0a0+nv26.10", "2.15.0rc1"])
def test_newer_than_tested_is_warned_of(told: pytest.MonkeyPatch, version: str) -> None:
    told.setattr("torch.__version__", version)
    with pytest.warns(UntestedTorch, match="check their gradients") as caught:
        torch_versions.check()
    assert len(caught) == 1
    assert version in str(caught[0].message)
    assert not torch_versions.is_tested()


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.12.1", False),  # runs, and checks itself
        ("2.11.0+cu130", True),
        ("2.9.1", True),
        ("2.13.0+cpu", True),
        ("2.14.1", False),
        ("2.15.0+cu132", True),
        ("2.15.3", True),
        ("2.14.0a0+nv26.06", False),  # built before the release
    ],
)
def test_others_are_quiet(told: pytest.MonkeyPatch, version: str, is_tested: bool) -> None:
    told.setattr("torch.__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_versions.check()
    assert torch_versions.is_tested() is is_tested


def test_a_call_that_a_version_lacks_is_named_in_one_sentence(told: pytest.MonkeyPatch) -> None:
    told.setattr("torch.__version__", "2.12.1")
    error = torch_versions.lacks("FSDPModule.reset_iter_state()", (2, 13), "This")
    assert str(error).splitlines() == [
        "This needs FSDPModule.reset_iter_state(), which torch 2.12.1 does not have; it was added in torch 2.13.",
        "  do        pip install 'torch>=2.13,<2.16'",
    ]


def test_calls_that_torch_2_12_lacks_are_refused_by_name(told: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    told.setattr("torch.__version__", "2.12.1")
    with pytest.raises(TorchTooOld, match=r"^The schedule zbv_zero_bubble needs .* torch 2\.12\.1 does not have"):
        schedule_of("zbv_zero_bubble")
    assert schedule_of("1f1b").name == "1f1b"
    told.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    missing = r"shard\(\) needs FSDPModule\.set_reduce_scatter_unused_params\(\), which"
    with rankwise.join(), pytest.raises(TorchTooOld, match=missing):
        rankwise.shard(torch.nn.Linear(2, 2))


def test_the_installed_torch_runs_what_it_has_and_refuses_what_it_lacks() -> None:
    if torch_versions.is_at_least((2, 13)):
        assert schedule_of("zbv_zero_bubble").splits_backward
        return
    with pytest.raises(TorchTooOld, match=r"^The schedule zbv_zero_bubble needs .* added in torch 2\.13\."):
        schedule_of("zbv_zero_bubble")
    message = r"^rankwise\.shard\(\) needs .* added in torch 2\.13\.\n.*pip install 'torch>=2\.13,"
    with rankwise.join(), pytest.raises(TorchTooOld, match=message):
        rankwise.shard(torch.nn.Linear(2, 2))


def test_strategies_for_newer_versions_are_refused_in_one_sentence(told: pytest.MonkeyPatch) -> None:
    told.setattr("torch.__version__", "2.10.0")
    model = torch.nn.Linear(2, 2)
    with rankwise.join():
        for call in (partial(rankwise.tensor_parallel, model), partial(rankwise.pipeline, model, None, example=None)):
            name = f"rankwise.{call.func.__name__}()"
            with pytest.raises(TorchTooOld) as caught:
                call()
            assert is_refusal(str(caught.value))
            assert str(caught.value).splitlines() == [
                f"{name} needs torch 2.11 or newer, but torch 2.10.0 is installed.",
                "  do        pip install 'torch>=2.11,<2.16', or use rankwise.replicate()",
            ]


@pytest.mark.parametrize(
    ("said", "refuses", "runs"),
    [
        ("rankwise.pipeline() needs torch 2.11 or newer, but torch 2.9.1 is installed.", "2.10.0", "2.11.0"),
        ("rankwise.tensor_parallel() needs torch 2.11 or newer, but torch 2.9.1 is installed.", "2.10.0", "2.11.0"),
        (str(torch_versions.lacks("FSDPModule.some_call()", (2, 13), "rankwise.shard()")), "2.12.1", "2.13.0"),
        (str(torch_versions.lacks(BACKWARD_OF_INPUTS, (2, 13), "The schedule zbv_zero_bubble")), "2.12.1", "2.13.0"),
    ],
)
def test_a_refusal_excuses_a_test_on_versions_that_lack_the_call_only(
    told: pytest.MonkeyPatch, said: str, refuses: str, runs: str
) -> None:
    told.setattr("torch.__version__", refuses)
    assert is_refusal(f"E   TorchTooOld: {said}")
    assert not is_refusal("E   TorchTooOld: rankwise needs torch 2.99 or newer, but torch 2.9.1 is installed.")
    told.setattr("torch.__version__", runs)
    assert not is_refusal(f"E   TorchTooOld: {said}")


def test_the_requirement_says_what_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert torch_versions.requirement() in project["dependencies"]


PROGRAM = """
import sys, warnings
from types import ModuleType
if {version!r}:
    torch = ModuleType("torch")
    torch.__version__ = {version!r}
    sys.modules["torch"] = torch
import rankwise
from rankwise import torch_versions
assert ("torch" in sys.modules) == bool({version!r}), "importing rankwise imported torch"
print(torch_versions.installed())
"""


def imported(version: str) -> subprocess.CompletedProcess[str]:
    """Import rankwise in a process of its own, which sees this version of torch; or the one that is there."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(version=version)], capture_output=True, text=True, timeout=80, check=False
    )


def test_importing_on_the_installed_torch_reads_its_version_without_importing_it() -> None:
    done = imported("")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == torch.__version__


def test_importing_on_an_old_torch_fails_with_a_clear_error() -> None:
    done = imported("2.8.0")
    assert done.returncode == 1
    version = rankwise.__version__
    assert f"TorchTooOld: rankwise {version} needs torch 2.9 or newer, but torch 2.8.0 is installed." in done.stderr
    assert "pip install" in done.stderr


def test_importing_on_an_unknown_torch_warns_once() -> None:
    done = imported("2.99.0")
    assert done.returncode == 0
    assert done.stderr.count("UntestedTorch") == 1
    assert "torch 2.99.0 is newer than the newest version" in done.stderr
