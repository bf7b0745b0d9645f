# SPDX-License-Identifier: Apache-2.0
"""One model on several devices of one process, CPU memory and disk among them: each layer has one home.

Works in place, for training and inference. Holds the public calls.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rankwise.errors import ConfigurationError, bytes_text
from rankwise.meter import note_layout
from rankwise.place import hooks
from rankwise.place.plan import (
    OFFLOADED,
    PartSize,
    PlacedPart,
    Placement,
    PlacementPlan,
    by_hand,
    by_policy,
    default_budgets,
    device_name,
    executing,
    free_disk_bytes,
    parse_bytes,
)
from rankwise.place.units import joined, sizes_of, units_of
from rankwise.place.weights import (
    OffloadFiles,
    TensorDevices,
    WeightSource,
    bytes_of_quantised,
    commit,
    in_short,
    prepare,
    quantisable,
)
from rankwise.replicate.blocks import near
from rankwise.replicate.self_check import check_torch, gradients, loss_fn
from rankwise.replicate.strategy_registry import (
    check_unregistered,
    is_placed,
    register_placed,
)
from rankwise.tensors.files import open_tensor_files
from rankwise.torch_private.modules import own_buffers, own_parameters
from rankwise.world.device.accelerator import example

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from rankwise.place.units import Slot, Unit
    from rankwise.replicate.blocks import Kept
    from rankwise.replicate.self_check import Bench, Compared


M = TypeVar("M", bound="nn.Module")


@dataclass(frozen=True, slots=True)
class _Placed:
    """What is kept of a placed model, as long as the model exists."""

    placement: Placement
    files: OffloadFiles | None
    """Removed with the model."""


_placed: WeakKeyDictionary[nn.Module, _Placed] = WeakKeyDictionary()


def place(
    model: M | Callable[[], M],
    plan: str | Mapping[str, str] = "auto",
    *,
    budgets: Mapping[str, str | int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    keep_whole: Kept | Iterable[Kept] = (),
    int8: bool = False,
) -> M:
    """Spread the layers of ``model`` over the devices of this process, in place.

    Needs no world and does no communication. In a joined world call it first: ``replicate(place(model))`` trains the
    model data parallel, each rank with devices of its own.

    The model keeps its class, its ``state_dict`` keys and its ``Parameter`` objects, so an optimizer may be built
    before or after. A layer's inputs are moved to its device; its outputs, and so the model's, stay where they were
    calculated. Layers that do not fit on the GPUs are kept in CPU memory, and those that do not fit there on disk. They
    are fetched while they run, the next layer ahead of time, forward and backward; at most two such layers are in
    memory. Gradients arrive in ``parameter.grad`` at home, and optimizers change the weights there: for disk, in the
    mapped file. Gradients and optimizer state are always in memory. The result is that of one device.

    Devices are ``"cuda:0"`` and the like, ``"cpu"``, ``"disk"``, and, for tensors on the meta device, ``"meta"``, which
    holds shapes only. Layers on ``"cpu"`` or ``"disk"`` run on the first GPU of the plan or the budgets, if any.

    Args:
        model: with its weights, or built on the meta device (``with torch.device("meta"):``) and loaded from
            ``checkpoint``; in its final dtype. With ``checkpoint``, also a function without arguments (or the class)
            that builds it, which is called on the meta device.
        plan: ``"auto"`` or ``"balanced"`` (GPUs get equal shares), ``"balanced_low_0"`` (the first GPU as little as
            possible), ``"sequential"`` (one GPU after the other is filled); or a mapping of module names to devices, in
            which the longest name that fits wins and ``""`` stands for everything else.
        budgets: bytes for weights per device (``{"cuda:0": "10GiB", "cpu": "30GiB"}``), not counting activations,
            gradients and optimizer state. By default the free memory, less a tenth.
        checkpoint: a safetensors file, or a folder of them; each tensor is read directly to its device.
        offload_folder: a folder for files of weights on disk, which are removed with the model.
        keep_whole: classes or names of modules not to be split, in addition to what :func:`blocks` finds.
        int8: weights of linear layers in 8 bits, by torchao. For inference only, and not exact: every parameter gets
            ``requires_grad=False``.

    Returns:
        ``model`` itself, or the model that was built. ``print(rankwise.placement(model))`` shows the device of each
        part, and why.

    Raises:
        ConfigurationError: the plan or the budgets name an unknown module or device, split a block, or leave too
            little room. The model is unchanged.
        CheckpointError: the files are damaged, or of another model. The model is unchanged.
        WrongGradients: this version of torch is not a tested one, and a small model trained wrongly on it.
    """
    _check_paths(checkpoint=checkpoint, offload_folder=offload_folder)
    model = _built(model) if checkpoint is not None else cast("M", model)
    _check_model(model)
    check_torch("place", _trial)
    units = units_of(model, keep_whole)
    to_int8 = quantisable(model) if int8 else set[int]()
    sizes = sizes_of(units, lambda slot: _bytes_at_home(slot, to_int8))
    chosen = _planned(model, plan, units, sizes, _budgets(model, plan, budgets, offload_folder))
    on_disk = any(choice.device == "disk" for choice in chosen.choices.values())
    if on_disk and offload_folder is None:
        raise ConfigurationError(
            "The plan puts weights on disk, but offload_folder was not given.", do="pass offload_folder="
        )
    runs_on = {unit: torch.device(chosen.runs_on(unit.name)) for unit in units}
    home_of: dict[int, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            home_of.setdefault(id(parameter), chosen.choices[unit.name].device)
    homes = TensorDevices(home_of, runs_on, to_int8)
    _check_kept(units, homes)
    parts = [_part(unit, size, chosen, homes) for unit, size in zip(units, sizes, strict=True)]
    with ExitStack() as on_error, ExitStack() as always:
        opened = None if checkpoint is None else always.enter_context(open_tensor_files(checkpoint))
        with_values = [slot for unit in units for slot in unit.slots if homes.of(unit, slot) != "meta"]
        weights = WeightSource(model, with_values, opened)
        files = None
        if on_disk and offload_folder is not None:
            files = OffloadFiles(offload_folder)
            on_error.callback(files.remove)
        new = prepare(units, homes, weights, files)
        away = {unit for unit in units if any(home_of[id(p)] != str(runs_on[unit]) for p in unit.parameters)}
        commit(units, new, to_int8)
        on_error.pop_all()
    hooks.install(model, runs_on, away, is_ahead=chosen.has_room_ahead)
    note_layout("placement", parts=[(one.module, one.device, one.num_bytes, one.runs_on, one.why) for one in parts])
    if to_int8:
        hooks.refuse_training(model)
        model.requires_grad_(requires_grad=False)
    _placed[model] = _Placed(Placement(tuple(parts), chosen.has_room_ahead), files)
    register_placed(model)
    return model


def placement(model: nn.Module) -> Placement:
    """Return where the parts of a placed model are, and why; printed, it is a table.

    Raises:
        ConfigurationError: the model is not placed.
    """
    placed = _placed.get(model)
    if placed is None:
        raise ConfigurationError(
            f"placement() was given a {type(model).__name__} that is not placed.",
            do="pass the model that rankwise.place() was called with",
        )
    return placed.placement


def _built(model: M | Callable[[], M]) -> M:
    """Return the model, built on the meta device if a function is given."""
    if isinstance(model, nn.Module) or not callable(model):
        return cast("M", model)
    with torch.device("meta"):
        return model()


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        do = "pass a torch.nn.Module; with checkpoint=, a function that creates one"
        raise ConfigurationError(f"place() takes a torch.nn.Module, not {what}.", do=do)
    if is_placed(model):
        raise ConfigurationError(
            "place() was already called on this model or a part of it.", do="call place() once, for the whole model"
        )
    check_unregistered(model, "place")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ConfigurationError(
                f"{name} has no shape yet.", do="call the model once with an example input, then place()"
            )
        if hasattr(tensor, "placements"):
            raise ConfigurationError(
                f"{name} is already divided among ranks.",
                do="place() requires an unsharded model: omit shard() or place()",
            )


def _check_paths(**paths: object) -> None:
    for name, path in paths.items():
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigurationError(
                f"{name} must be a path, got {path!r}.", do=f'pass a path: {name}="/scratch/llama"'
            )


def _check_kept(units: Sequence[Unit], homes: TensorDevices) -> None:
    """Raise if the plan would throw values away."""
    slots = [slot for unit in units for slot in unit.slots if homes.of(unit, slot) == "meta"]
    lost = [slot.name for slot in slots if not slot.tensor.is_meta]
    if lost:
        raise ConfigurationError(
            f"The plan would discard the values of {len(lost)} tensors: the meta device holds shapes only.",
            evidence=in_short(lost),
            do="assign them to another device; or, to keep only shapes, create the model on the meta device first",
        )


def _budgets(
    model: nn.Module,
    plan: str | Mapping[str, str],
    budgets: Mapping[str, str | int] | None,
    offload_folder: str | os.PathLike[str] | None,
) -> dict[str, int] | None:
    """Return the budgets in bytes, accelerators first; ``None`` for a plan by hand without budgets."""
    if budgets is None:
        if not isinstance(plan, str):
            return None
        already: dict[str, int] = {}
        for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
            already[str(tensor.device)] = already.get(str(tensor.device), 0) + tensor.nbytes
        return default_budgets(already, offload_folder)
    if not isinstance(budgets, Mapping):
        raise ConfigurationError(
            f"budgets= is a {type(budgets).__name__}.", do=f'budgets={{"{example()}": "10GiB", "cpu": "30GiB"}}'
        )
    given = {device_name(device): parse_bytes(amount) for device, amount in budgets.items()}
    if offload_folder is not None and "disk" not in given:
        given["disk"] = free_disk_bytes(offload_folder)
    first = sorted(given, key=lambda device: OFFLOADED.index(device) if device in OFFLOADED else -1)
    return {device: given[device] for device in first}


def _bytes_at_home(slot: Slot, to_int8: set[int]) -> int:
    tensor = slot.tensor
    return bytes_of_quantised(tensor) if id(tensor) in to_int8 else tensor.numel() * tensor.element_size()


def _planned(
    model: nn.Module,
    plan: str | Mapping[str, str],
    units: Sequence[Unit],
    sizes: Sequence[PartSize],
    budgets: dict[str, int] | None,
) -> PlacementPlan:
    if isinstance(plan, str):
        return by_policy(plan, sizes, budgets or {})
    if not isinstance(plan, Mapping):
        raise ConfigurationError(
            f"plan= is a {type(plan).__name__}.",
            do=f'plan="auto", or a mapping: {{"layers.0": "{example()}", "": "cpu"}}',
        )
    given = {name: device_name(device) for name, device in plan.items()}
    names_of = _all_names(model)
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known.update(name for names in names_of.values() for name in names)
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"The plan names {name!r}, but {type(model).__name__} has no such module.",
                evidence=near(str(name), known),
                do='correct the name; "" stands for everything else',
            )
    inside = {unit.name: [names_of[slot.module, slot.attribute] for slot in unit.slots] for unit in units}
    choices = by_hand(given, inside, {unit.name: unit.why_whole for unit in units})
    planned = PlacementPlan(choices, executing([*(budgets or {}), *given.values()]))
    _check_budgets(planned, sizes, budgets)
    return planned


def _all_names(model: nn.Module) -> dict[tuple[nn.Module, str], list[str]]:
    """Return all names of each parameter and buffer; a module that is registered twice has two."""
    names: dict[tuple[nn.Module, str], list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for inner in (*own_parameters(module), *own_buffers(module)):
            names.setdefault((module, inner), []).append(joined(name, inner))
    return names


def _check_budgets(plan: PlacementPlan, sizes: Sequence[PartSize], budgets: dict[str, int] | None) -> None:
    """Raise if a plan by hand exceeds the budgets given with it."""
    if budgets is None:
        return
    used: dict[str, int] = {}
    for size in sizes:
        device = plan.choices[size.name].device
        used[device] = used.get(device, 0) + size.num_bytes
    over = [device for device, amount in used.items() if amount > budgets.get(device, amount)]
    if over:
        raise ConfigurationError(
            f"The plan puts more on {', '.join(over)} than the budget allows.",
            evidence="\n".join(f"{name}: {bytes_text(used[name])} of {bytes_text(budgets[name])}" for name in over),
            do="move layers to another device in the plan, or increase the budget",
        )


def _part(unit: Unit, size: PartSize, plan: PlacementPlan, where: TensorDevices) -> PlacedPart:
    choice = plan.choices[unit.name]
    homes = {where.of_parameter[id(parameter)] for parameter in unit.parameters}
    why = choice.why
    if size.tied_to is not None and homes != {choice.device}:
        why += f"; weights shared with {size.tied_to} are on {', '.join(sorted(homes - {choice.device}))}"
    device = choice.device if unit.parameters or choice.device != "disk" else plan.runs_on(unit.name)
    return PlacedPart(
        unit.name, device, size.num_bytes, _dtypes(unit, where.to_int8), runs_on=plan.runs_on(unit.name), why=why
    )


def _dtypes(unit: Unit, to_int8: set[int]) -> tuple[str, ...]:
    """Return the dtypes of a part, the one of the most bytes first."""
    num_bytes: dict[str, int] = {}
    for slot in {id(slot.tensor): slot for slot in unit.slots}.values():
        name = "int8" if id(slot.tensor) in to_int8 else str(slot.tensor.dtype).removeprefix("torch.")
        num_bytes[name] = num_bytes.get(name, 0) + _bytes_at_home(slot, to_int8)
    return tuple(sorted(num_bytes, key=num_bytes.__getitem__, reverse=True))


def _trial(bench: Bench) -> Generator[Compared]:
    """Train a small placed model for two steps, one layer fetched from disk, and yield its gradients."""
    model, plain = bench.net(2), bench.net(2)
    with tempfile.TemporaryDirectory(prefix="rankwise-place-") as folder:
        place(model, {"0": str(bench.device), "1": "disk"}, offload_folder=folder)
        for number in range(2):
            x, y, first, last = bench.batch(number)
            loss_fn(model(x[first:last]), y[first:last]).backward()
            loss_fn(plain(x[first:last]), y[first:last]).backward()
        yield from gradients(model, plain)
