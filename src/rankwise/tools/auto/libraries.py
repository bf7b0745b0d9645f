# SPDX-License-Identifier: Apache-2.0
"""What libraries write past Python's ``open``, from C++ or Rust or to a server: by rank zero alone, or refused."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.tools.after_import import changed_after_import
from rankwise.tools.auto.hdf5_files import HDF5OfRankZero
from rankwise.tools.auto.trackers import events_of_rank_zero, folder_of_rank_zero, wandb_of_rank_zero
from rankwise.tools.auto.videos import videos_of_rank_zero
from rankwise.tools.replacing import replace_attributes
from rankwise.world.temporary_folders import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import ModuleType

    from rankwise.tools.after_import import Change
    from rankwise.tools.auto.shared_calls import SharedCalls
    from rankwise.tools.replacing import Replaced

_WRITES: dict[str, list[tuple[str, int, str]]] = {
    "SimpleITK": [("WriteImage", 1, "fileName")],
    "cv2": [("imwrite", 0, "filename"), ("imwritemulti", 0, "filename")],
    "polars": [(f"DataFrame.write_{kind}", 1, "file") for kind in ("avro", "csv", "ipc", "json", "ndjson", "parquet")],
    "pyarrow.csv": [("write_csv", 1, "output_file")],
    "pyarrow.feather": [("write_feather", 1, "dest")],
    "pyarrow.dataset": [("write_dataset", 1, "base_dir")],
    "pyarrow.parquet": [("write_table", 1, "where"), ("write_to_dataset", 1, "root_path")],
    "scipy.io": [("mmwrite", 0, "target")],
    "soundfile": [("write", 0, "file")],
    "tokenizers": [("Tokenizer.save", 1, "path")],
    "torch.autograd.profiler": [("profile.export_chrome_trace", 1, "path")],
    "torch.profiler": [("profile.export_chrome_trace", 1, "path")],
    "torchaudio": [("save", 0, "uri")],
    "torchvision.io.image": [("write_jpeg", 1, "filename"), ("write_png", 1, "filename")],
}
"""By module: functions and methods that write one file, the position of its path, and the name of that argument."""
_OPENS = {
    "dbm": ("open",),
    "lmdb": ("open",),
    "mlflow.tracking.fluent": ("start_run",),
    "netCDF4": ("Dataset",),
    "pyarrow.parquet": ("ParquetWriter",),
    "swanlab": ("init",),
    "tables": ("open_file",),
}
"""By module: what opens something that stays open and is written to."""
_READ_BY_DEFAULT = {"dbm", "netCDF4", "tables"}
_MODE = 1
"""Position of the mode among the arguments of those that have one."""


@contextmanager
def libraries_replaced(shared: SharedCalls) -> Generator[None]:
    """Write on rank zero alone inside the block what the libraries named here write; raise where that cannot be."""
    with shared.alone():
        own = make_temporary_folder("auto")
    changes: dict[str, list[Change]] = {
        "cv2": [videos_of_rank_zero(shared, own)],
        "h5py": [HDF5OfRankZero(shared, own).change],
        "tensorboardX.writer": [events_of_rank_zero(shared), folder_of_rank_zero()],
        "torch.utils.tensorboard.writer": [events_of_rank_zero(shared), folder_of_rank_zero()],
        "wandb": [wandb_of_rank_zero(shared)],
    }
    for name, functions in _WRITES.items():
        changes.setdefault(name, []).append(partial(_written_once, shared, functions))
    for name, openers in _OPENS.items():
        changes.setdefault(name, []).append(partial(_refused, openers))
    with changed_after_import({name: partial(_all_of, several) for name, several in changes.items()}):
        try:
            yield
        finally:
            with shared.alone():
                remove_temporary_folder(own)


def _all_of(changes: list[Change], module: ModuleType) -> Replaced:
    return [replaced for change in changes for replaced in change(module)]


def _written_once(shared: SharedCalls, functions: list[tuple[str, int, str]], module: ModuleType) -> Replaced:
    before: Replaced = []
    for path, position, keyword in functions:
        *owners, name = path.split(".")
        owner = getattr(module, owners[0], None) if owners else module
        before += replace_attributes(owner, [name], partial(shared.written_once, position, (keyword,)))
    return before


def _refused(names: tuple[str, ...], module: ModuleType) -> Replaced:
    library = module.__name__.partition(".")[0]

    def make(name: str, opens: Callable[..., Any]) -> Callable[..., Any]:
        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            default = "r" if module.__name__ in _READ_BY_DEFAULT else None
            mode = args[_MODE] if len(args) > _MODE else kwargs.get("mode", kwargs.get("flag", default))
            if mode != "r" and not kwargs.get("readonly"):
                raise ConfigurationError(
                    f"The script writes with {library}.{name}, which every rank would do.",
                    where=words(user_call_site()),
                    do="write to a file in another way, or run without --auto",
                )

        # lmdb.open is a class that has no subclasses; scripts name it lmdb.Environment where they need one.
        if isinstance(opens, type) and name != "open":
            return _checked_class(opens, check)
        return _checked_function(opens, check)

    return [one for name in names for one in replace_attributes(module, [name], partial(make, name))]


def _checked_function(opens: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    @wraps(opens)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return opens(*args, **kwargs)

    return call


def _checked_class(opens: type[Any], check: Callable[..., None]) -> type[Any]:
    """Return a class that stays one, for annotations and ``isinstance``."""

    def new(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return object.__new__(cls) if opens.__new__ is object.__new__ else opens.__new__(cls, *args, **kwargs)

    return type(opens.__name__, (opens,), {"__new__": new, "__doc__": opens.__doc__})
