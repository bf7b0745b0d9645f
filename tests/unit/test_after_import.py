# SPDX-License-Identifier: Apache-2.0
"""Modules changed once they are imported, and as before afterwards."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING

import pytest

from rankwise.tools.after_import import changed_after_import
from rankwise.tools.replacing import replace_attributes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import ModuleType

    from rankwise.tools.replacing import Replaced

NAMES = ("written_by_hand", "imports_itself")
# As OpenCV does: a module that imports another one of its own name and takes what that has.
IMPORTS_ITSELF = """
import importlib, sys
here = sys.modules.pop(__name__)
folder, sys.path[:] = sys.path[:], [__file__.rpartition("/")[0] + "/native", *sys.path]
native = importlib.import_module(__name__)
sys.path[:] = folder
sys.modules[__name__] = here
save = native.save
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "written_by_hand.py").write_text("def save():\n    return 1\nkept = save\n")
    (tmp_path / "imports_itself.py").write_text(IMPORTS_ITSELF)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "imports_itself.py").write_text("def save():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


def _one_more(module: ModuleType) -> Replaced:
    return replace_attributes(module, ["save"], lambda save: lambda: save() + 1)


CHANGES = dict.fromkeys(NAMES, _one_more)


@pytest.mark.usefixtures("folder")
def test_a_module_is_changed_when_it_is_imported_and_as_before_afterwards() -> None:
    finders = list(sys.meta_path)
    with changed_after_import(CHANGES):
        assert not set(NAMES) & set(sys.modules)
        module = importlib.import_module("written_by_hand")
        assert (module.save(), module.kept()) == (2, 1)
        assert module.__spec__ is not None
        assert module.__loader__ is module.__spec__.loader
        assert isinstance(module.__loader__, SourceFileLoader)
    assert module.save() == 1
    assert sys.meta_path == finders


@pytest.mark.usefixtures("folder")
def test_a_module_that_is_imported_already_is_changed_at_once() -> None:
    module = importlib.import_module("written_by_hand")
    with changed_after_import(CHANGES):
        assert module.save() == 2
    assert module.save() == 1


@pytest.mark.usefixtures("folder")
def test_a_module_that_imports_another_of_its_name_is_changed_once() -> None:
    with changed_after_import(CHANGES):
        assert importlib.import_module("imports_itself").save() == 2


@pytest.mark.usefixtures("folder")
def test_what_was_changed_twice_is_as_before_afterwards() -> None:
    module = importlib.import_module("written_by_hand")
    own = module.save
    with changed_after_import({"written_by_hand": lambda module: [*_one_more(module), *_one_more(module)]}):
        assert module.save() == 3
    assert module.save is own


def test_a_module_that_does_not_exist_is_not_found() -> None:
    with changed_after_import({"no_such_module": _one_more}), pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
