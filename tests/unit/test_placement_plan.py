# SPDX-License-Identifier: Apache-2.0
"""Plans as values: policies under budgets, room for fetching, tied parts, plans by hand."""

from __future__ import annotations

import pytest

from rankwise.errors import ConfigurationError, bytes_text
from rankwise.place.plan import PartSize, by_hand, by_policy, parse_bytes

POLICIES = ["auto", "balanced", "balanced_low_0", "sequential"]


def _sizes(*num_bytes: int) -> list[PartSize]:
    return [PartSize(f"layer{number}", size, size) for number, size in enumerate(num_bytes)]


def _devices(policy: str, sizes: list[PartSize], **budgets: int) -> str:
    """Return the devices of the parts, one letter each: the number of a GPU, c, d."""
    named = {name.replace("cuda", "cuda:"): amount for name, amount in budgets.items()}
    plan = by_policy(policy, sizes, named)
    used = dict.fromkeys(named, 0)
    for size in sizes:
        used[plan.choices[size.name].device] += size.num_bytes
    assert all(amount <= named[device] for device, amount in used.items())
    return "".join(plan.choices[size.name].device.removeprefix("cuda:")[0] for size in sizes)


@pytest.mark.parametrize(
    ("policy", "budgets", "expected"),
    [
        ("sequential", {"cuda0": 45, "cuda1": 100, "cpu": 100}, "00001111"),
        ("balanced", {"cuda0": 100, "cuda1": 100, "cpu": 100}, "00001111"),
        ("auto", {"cuda0": 100, "cuda1": 100, "cuda2": 100}, "00011122"),
        ("balanced", {"cuda0": 20, "cuda1": 100, "cuda2": 100}, "00111222"),
        ("balanced_low_0", {"cuda0": 100, "cuda1": 30, "cuda2": 100}, "11122222"),
        ("balanced_low_0", {"cuda0": 100, "cuda1": 30, "cuda2": 30}, "00111222"),
        # Two parts of 10 are kept free on the device that executes.
        ("sequential", {"cuda0": 40, "cpu": 30, "disk": 100}, "00cccddd"),
        ("balanced", {"cuda0": 40, "cuda1": 20, "cpu": 100}, "0011cccc"),
        ("auto", {"cpu": 50, "disk": 100}, "cccddddd"),
        ("auto", {"cpu": 80}, "cccccccc"),
        # Room for one at a time only.
        ("auto", {"cpu": 15, "disk": 100}, "dddddddd"),
        ("auto", {"disk": 100}, "dddddddd"),
    ],
)
def test_policies_keep_to_budgets(policy: str, budgets: dict[str, int], expected: str) -> None:
    assert _devices(policy, _sizes(*[10] * 8), **budgets) == expected


def test_shares_are_as_even_as_blocks_allow() -> None:
    assert _devices("balanced", _sizes(30, 10, 10, 10, 10, 5, 5), cuda0=100, cuda1=100) == "0011111"
    assert _devices("balanced", _sizes(10, 10, 30), cuda0=100, cuda1=100) == "001"


def test_room_for_fetching_decides_what_is_fetched_ahead() -> None:
    sizes = _sizes(*[10] * 8)
    assert by_policy("auto", sizes, {"cpu": 20, "disk": 100}).has_room_ahead
    assert not by_policy("auto", sizes, {"cpu": 19, "disk": 100}).has_room_ahead
    assert by_policy("auto", sizes, {"cuda:0": 40, "cpu": 100}).runs_on("layer7") == "cuda:0"
    assert by_policy("auto", sizes, {"cpu": 40, "disk": 100}).runs_on("layer7") == "cpu"


@pytest.mark.parametrize("policy", POLICIES)
def test_large_parts_go_where_they_fit_and_small_ones_fill_gaps(policy: str) -> None:
    assert _devices(policy, _sizes(10, 60, 10), cpu=125, disk=100) == "ccc"
    assert _devices(policy, _sizes(10, 30, 5, 5), cpu=45, disk=100) == "cdcd"


def test_tied_parts_stay_together() -> None:
    sizes = [*_sizes(10, 10, 10, 10), PartSize("head", 2, 12, "layer0")]
    assert _devices("sequential", sizes, cuda0=22, cuda1=100) == "00110"
    plan = by_policy("balanced", sizes, {"cuda:0": 100, "cuda:1": 100})
    assert plan.choices["head"].device == "cuda:0"
    assert plan.choices["head"].why == "shares weights with layer0"


@pytest.mark.parametrize("policy", POLICIES)
def test_arguments_that_do_not_fit_are_refused(policy: str) -> None:
    with pytest.raises(ConfigurationError, match="layer1 takes 50 B, more than any budget allows"):
        by_policy(policy, _sizes(10, 50), {"cuda:0": 30, "cuda:1": 40})
    with pytest.raises(ConfigurationError, match=r"layer1 takes 50 B(.*\n)*.*cpu: 40 B") as caught:
        by_policy(policy, _sizes(10, 50), {"cpu": 40, "disk": 1000})
    assert "It has to run on cpu" in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"The model takes 60 B.*\n(.*\n)*.*add \"cpu\" to budgets"):
        by_policy(policy, _sizes(*[10] * 6), {"cuda:0": 30, "cuda:1": 20})
    with pytest.raises(ConfigurationError, match="no device with free memory"):
        by_policy(policy, _sizes(10), {"cpu": 0})


def _by_hand(plan: dict[str, str], parts: dict[str, list[list[str]]]) -> dict[str, str]:
    return {name: choice.device for name, choice in by_hand(plan, parts, dict.fromkeys(parts, "it is a layer")).items()}


def test_plans_by_hand_take_the_longest_prefix() -> None:
    parts = {"a.0": [["a.0.weight"], ["a.0.bias"]], "a.1": [["a.1.weight"]], "a.10": [["a.10.weight"]], "b": [["b"]]}
    plan = {"": "disk", "a": "cpu", "a.1": "cuda:0", "b": "cuda:1"}
    assert _by_hand(plan, parts) == {"a.0": "cpu", "a.1": "cuda:0", "a.10": "cpu", "b": "cuda:1"}
    assert _by_hand({"a": "cpu", "b": "cpu", "a.0.bias": "cpu"}, parts)["a.0"] == "cpu"
    with pytest.raises(ConfigurationError, match=r"splits a\.0, which must remain whole: it is a layer"):
        _by_hand({"": "cpu", "a.0.bias": "disk"}, parts)
    with pytest.raises(ConfigurationError, match=r"not cover 2 parameters and buffers.\n.*a\.10\.weight, b"):
        _by_hand({"a.0": "cpu", "a.1": "cpu"}, parts)


def test_plans_by_hand_may_use_any_name_of_a_module() -> None:
    parts = {"conv": [["conv.weight", "half1.0.weight"]], "fc": [["fc.weight", "half2.0.weight", "half2.1.weight"]]}
    assert _by_hand({"half1": "cuda:0", "half2": "cuda:1", "": "cpu"}, parts) == {"conv": "cuda:0", "fc": "cuda:1"}
    assert _by_hand({"conv": "cuda:0", "": "cpu"}, parts) == {"conv": "cuda:0", "fc": "cpu"}
    assert _by_hand({"half1": "cpu", "conv": "cpu", "half2": "disk"}, parts) == {"conv": "cpu", "fc": "disk"}
    with pytest.raises(ConfigurationError, match=r"gives conv\.weight 2 devices(.*\n)+.*half1.*: 'cpu'"):
        _by_hand({"conv": "disk", "half1": "cpu", "": "cpu"}, parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(7, 7), ("7", 7), ("1.5KB", 1500), ("10GiB", 10 * 2**30), (" 2 mib ", 2**21), ("1TB", 10**12), ("3B", 3)],
)
def test_amounts(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", [-1, "1.5.1GB", "GiB", "1XB", "", None, 1.5, True])
def test_invalid_amounts(text: object) -> None:
    with pytest.raises(ConfigurationError, match="not an amount of memory"):
        parse_bytes(text)  # type: ignore[arg-type]


def test_amounts_are_formatted_with_units() -> None:
    assert [bytes_text(amount) for amount in (12, 2048, 3 * 2**30 // 2)] == ["12 B", "2 KiB", "1.5 GiB"]
