# SPDX-License-Identifier: Apache-2.0
"""Which versions of torch rankwise supports: read without importing torch, checked when rankwise is imported.

Holds the one list of tested versions. Imported by the package itself and by code that checks a version before use.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path

from rankwise.errors import TorchTooOld, UntestedTorch
from rankwise.version import VERSION

OLDEST = (2, 9)
"""The first release with everything that rankwise always needs. Older ones are rejected."""
TESTED = ((2, 9), (2, 11), (2, 13), (2, 15))
"""Releases on which CI runs the tests. On others the strategies check their gradients before use."""

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)*(a|b|rc|\.dev)?")


def requirement() -> str:
    """Return the requirement for pip: ``torch>=2.9,<2.16``."""
    major, minor = TESTED[-1]
    return f"torch>={_dotted(OLDEST)},<{major}.{minor + 1}"


def installed() -> str | None:
    """Return the version of torch in this environment, as ``2.15.0+cu132``; ``None`` if it cannot be read."""
    version = getattr(sys.modules.get("torch"), "__version__", None)
    if version is not None:
        return str(version)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # Written there when torch is built; the package metadata takes ten times as long to read.
    try:
        source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None  # Another kind of build; importing it shows the problem, if there is one.
    found = re.search(r"^__version__ = ['\"](.+)['\"]", source, re.MULTILINE)
    return None if found is None else found[1]


def is_at_least(release: tuple[int, int]) -> bool:
    """Return whether the torch in this environment is ``release``, as ``(2, 13)``, or newer."""
    version = installed()
    return version is not None and release_of(version) >= release


def release_of(version: str) -> tuple[int, int]:
    """Return ``(2, 15)`` for ``2.15.0+cu132``.

    Raises:
        ValueError: it is not a version.
    """
    return _parsed(version)[0]


def is_tested(version: str | None = None) -> bool:
    """Return whether CI tests a release of torch, by default the installed one. Pre-releases do not count."""
    version = installed() if version is None else version
    if version is None:
        return False
    release, is_early = _parsed(version)
    return release in TESTED and not is_early


def check() -> None:
    """Reject a torch that is too old, and warn about one that is newer than any tested one.

    Raises:
        TorchTooOld: functions that rankwise needs are missing.
    """
    version = installed()
    if version is None:
        return  # Importing torch gives the better error.
    release, is_early = _parsed(version)
    if release < OLDEST:
        raise TorchTooOld(
            f"rankwise {VERSION} needs torch {_dotted(OLDEST)} or newer, but torch {version} is installed.",
            do=f"pip install '{requirement()}'",
        )
    if release > TESTED[-1] or (is_early and release == TESTED[-1]):
        warnings.warn(
            f"torch {version} is newer than the newest version that rankwise {VERSION} was tested on "
            f"({_dotted(TESTED[-1])}): shard, pipeline, tensor_parallel and place check their gradients before "
            f"first use. For a tested version: pip install '{requirement()}'",
            UntestedTorch,
            stacklevel=3,
        )


def require(release: tuple[int, int], feature: str) -> None:
    """Reject a torch that is older than ``release``, the first on which ``feature`` computes what one rank does.

    Raises:
        TorchTooOld: it is older.
    """
    if not is_at_least(release):
        raise TorchTooOld(
            f"{feature} needs torch {_dotted(release)} or newer, but torch {installed()} is installed.",
            do=f"{_install(release)}, or use rankwise.replicate()",
        )


def lacks(call: str, since: tuple[int, int], feature: str) -> TorchTooOld:
    """Return the error for torch's function ``call``, which was added in release ``since`` and is missing here.

    ``feature`` needs it, as the start of a sentence: ``"A sharded model whose backward broke off"``.
    """
    return TorchTooOld(
        f"{feature} needs {call}, which torch {installed()} does not have; it was added in torch {_dotted(since)}.",
        do=_install(since),
    )


def _install(release: tuple[int, int]) -> str:
    return f"pip install 'torch>={_dotted(release)},{requirement().rpartition(',')[2]}'"


def _parsed(version: str) -> tuple[tuple[int, int], bool]:
    found = _VERSION.match(version)
    if found is None:
        raise ValueError(f"{version!r} is not a torch version")
    return (int(found[1]), int(found[2])), found[3] is not None


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
