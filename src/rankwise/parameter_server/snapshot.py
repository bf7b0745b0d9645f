# SPDX-License-Identifier: Apache-2.0
"""Snapshots of one server's state in a folder: complete files or none, the newest two, with checksums.

Also the options of an optimizer as JSON, as files and messages hold them. Knows no other rank. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rankwise.checkpoint.folder import make_folder, staged_file
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.log import warn
from rankwise.tensors.arrays import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

Options = dict[str, Any]
FILE = re.compile(r"server-(\d+)-of-(\d+)-update-(\d+)\.safetensors")
NUM_KEPT = 2


class ServerSnapshots:
    """The files of one server.

    Args:
        folder: of all servers.
        server: number of this one.
        num_servers: how many there are.
        every: after how many updates to save.
        names: of the parameters that it keeps.
        parameters: these.
        optimizer: that updates them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        server: int,
        num_servers: int,
        every: int,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.every = every
        self._folder = folder
        self._server = server
        self._num_servers = num_servers
        self._names = list(names)
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._newest: int | None = None

    def updates(self) -> list[int]:
        """Return the updates of which there are undamaged files of this server, oldest first.

        Raises:
            CheckpointError: the folder belongs to another number of servers, or cannot be written to; a file cannot be
                read; or all are damaged.
        """
        self._check_room()
        found: list[int] = []
        damaged: list[int] = []
        for path in sorted(self._folder.glob("server-*.safetensors")):
            name = FILE.fullmatch(path.name)
            if name is None:
                continue
            server, num_servers, update = map(int, name.groups())
            if num_servers != self._num_servers:
                raise CheckpointError(
                    f"{self._folder} was written by {num_servers} parameter servers, but this job has "
                    f"{self._num_servers}.",
                    do=f"pass servers={num_servers}, or another directory=",
                )
            if server == self._server:
                (damaged if self._read(update) is None else found).append(update)
        if damaged and not found:
            raise CheckpointError(
                f"All saved states of parameter server {self._server} in {self._folder} are damaged.",
                evidence="\n".join(str(self._path(update)) for update in damaged),
                do="restore one of these files from a copy, or start over with another directory=",
            )
        return sorted(found)

    def load(self, update: int) -> dict[str, Any]:
        """Load parameters and optimizer state from the file of ``update``; return the positions of the workers.

        Raises:
            CheckpointError: the file belongs to another model or another optimizer.
        """
        found = self._read(update)
        if found is None:
            raise CheckpointError(
                f"{self._path(update)} was changed by another process.",
                do="run only one job at a time with this directory=",
            )
        tensors, reported = found
        if reported["kinds"] != self._kinds():
            there, here = (set(map(tuple, kinds)) for kinds in (reported["kinds"], self._kinds()))
            raise CheckpointError(
                f"{self._path(update)} contains other parameters than this model.",
                evidence=f"only in the file: {_parameters_text(there - here)}\nonly in this model: "
                f"{_parameters_text(here - there)}",
                do="pass another directory=, or the model it was written for",
            )
        there, here = (reported["optimizer"], len(reported["groups"])), self._optimizer_kind()
        if there != here:
            raise CheckpointError(
                f"{self._path(update)} belongs to another optimizer: {there[0]} with {there[1]} parameter groups; "
                f"this job uses {here[0]} with {here[1]}.",
                do="pass another directory=, or the optimizer it was written for",
            )
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(tensors[f"parameter/{name}"])
        set_options(self._optimizer, reported["groups"])
        for name, parameter in zip(self._names, self._parameters, strict=True):
            own: dict[str, Any] = dict(reported["values"].get(name, {}))
            for key in reported["tensors"].get(name, ()):
                value = tensors[f"optimizer/{name}/{key}"]
                own[key] = value if value.ndim == 0 else value.to(parameter.device)
            if own:
                self._optimizer.state[parameter] = own
        self._newest = update
        return dict(reported["workers"])

    def save(self, update: int, workers: Mapping[int, Any]) -> None:
        """Write the state after ``update``, with the positions of the workers, unless its file is there.

        Raises:
            CheckpointError: it cannot be written.
        """
        if update == self._newest:
            return
        tensors = {
            f"parameter/{name}": parameter.detach().cpu().contiguous()
            for name, parameter in zip(self._names, self._parameters, strict=True)
        }
        of_optimizer: dict[str, list[str]] = {}
        values: dict[str, dict[str, Any]] = {}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{name}/{key}"] = dense(value).detach().cpu().contiguous().clone()
                    of_optimizer.setdefault(name, []).append(key)
                else:
                    values.setdefault(name, {})[key] = value
        # The format has no complex numbers of this precision.
        complex_ones = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
        tensors |= {name: torch.view_as_real(tensors[name]) for name in complex_ones}
        reported = {
            "complex": complex_ones,
            "kinds": self._kinds(),
            "optimizer": type(self._optimizer).__name__,
            "groups": options_of(self._optimizer),
            "tensors": of_optimizer,
            "values": values,
            "workers": {str(worker): state for worker, state in workers.items()},
            "sum": _sum_of(tensors),
        }
        try:
            with staged_file(self._path(update)) as staging:
                save_file(tensors, staging, {"rankwise": json.dumps(reported)})
        except (OSError, SafetensorError) as error:
            raise self._no_room(error) from error
        self._newest = update
        self._delete_old()

    def _delete_old(self) -> None:
        own = {}
        for path in self._folder.glob(f"server-{self._server}-of-{self._num_servers}-update-*.safetensors"):
            name = FILE.fullmatch(path.name)
            if name is not None:
                own[int(name.group(3))] = path
        # Newer files were damaged, or missing on another server, when this server continued from an older one.
        newest = sorted(update for update in own if self._newest is None or update <= self._newest)[-NUM_KEPT:]
        for update in own.keys() - set(newest):
            own[update].unlink(missing_ok=True)

    def _check_room(self) -> None:
        """Raise if the folder cannot be written to; delete the files of interrupted writes."""
        try:
            make_folder(self._folder)
            probe = self._folder / f".server-{self._server}-of-{self._num_servers}.new"
            probe.touch()
            for path in (probe, *self._folder.glob(f".server-{self._server}-of-{self._num_servers}-update-*.new")):
                path.unlink()
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"Cannot write the state of parameter server {self._server} to {self._folder}: {error}",
            do="make room there, or pass another directory=",
        )

    def _optimizer_kind(self) -> tuple[str, int]:
        return type(self._optimizer).__name__, len(self._optimizer.param_groups)

    def _kinds(self) -> list[list[Any]]:
        """Return name, shape and dtype of every parameter, as JSON has them."""
        named = zip(self._names, self._parameters, strict=True)
        return [[name, *parameter.shape, str(parameter.dtype)] for name, parameter in named]

    def _path(self, update: int) -> Path:
        return self._folder / f"server-{self._server}-of-{self._num_servers}-update-{update:012d}.safetensors"

    def _read(self, update: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """Return a file's tensors, and the rest as JSON; warn and return ``None`` if it is damaged.

        Raises:
            CheckpointError: it cannot be read, so that nothing is known about its bytes.
        """
        path = self._path(update)
        try:
            with safe_open(path, framework="pt") as opened:  # type: ignore[no-untyped-call]
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict
                reported = json.loads(opened.metadata()["rankwise"])
            if reported["sum"] == _sum_of(tensors):
                tensors |= {name: torch.view_as_complex(tensors[name]) for name in reported["complex"]}
                return tensors, reported
            reason = "its bytes differ from those that were written"
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}",
                do="check the disk and the permissions, then try again; or start over with another directory=",
            ) from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            reason = str(error)
        warn(f"{path} is damaged and was skipped: {reason}", all_ranks=True)
        return None


def _sum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(memory_of(tensors[name].contiguous()), total)
    return total


def _parameters_text(kinds: Iterable[tuple[Any, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, *shape, _ in sorted(kinds)) or "nothing"


def options_of(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every group.

    Raises:
        ConfigurationError: one is not a number, a text or a tuple of them.
    """
    return [
        {name: _plain(name, value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_options(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Give every group the options that :func:`options_of` returned."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name, value in options.items():
            now = group.get(name)
            if isinstance(now, torch.Tensor):
                now.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) and not isinstance(now, list) else value


def _plain(name: str, value: object) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(name, one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"The optimizer's option {name} is a {type(value).__name__}, which cannot be sent to a parameter server.",
        do="use an optimizer whose options are numbers, strings, or tuples of them",
    )


def dense(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a dense one: the momentum of sparse gradients is sparse."""
    return value.to_dense() if value.is_sparse else value
