# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto`` prints and writes what plain Python does, for scripts as strangers write them.

``tests/corpus`` holds the scripts; none knows of rankwise. Exit code, output and every file are compared, numbers to
1e-10 (``tests/same_result.py``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.same_result import Result, differences

if TYPE_CHECKING:
    import subprocess

    from conftest import Command

CORPUS = Path(__file__).parents[1] / "corpus"
SCRIPTS = sorted(path.stem for path in CORPUS.glob("*.py"))
REFUSED = {
    "default_rng": "",
}
TOLERANCE = {
    # It computes in bfloat16, with 8 bits: sums of fewer rows round to other numbers.
    "amp_bf16": 0.03,
}
ON_MORE = {"digits_mlp", "cnn_batchnorm", "nanogpt", "lstm_lm", "wgan_gp", "resume_training", "randperm_batches"}
"""Scripts that run on 2, 3 and 4 ranks."""
CASES = [
    (name, ranks) for index, name in enumerate(SCRIPTS) for ranks in ([2, 3, 4] if name in ON_MORE else [2 + index % 2])
]


def _result(command: Command, ended: subprocess.CompletedProcess[str]) -> Result:
    return Result(ended.returncode, ended.stdout, command.folder)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_script_gives_what_plain_python_gives(command: Command, name: str, ranks: int) -> None:
    script = CORPUS / f"{name}.py"
    plain, auto = command.inside("plain"), command.inside("auto")
    shutil.copy(script, plain.folder)
    shutil.copy(script, auto.folder)
    expected = plain.python(script.name, env={"OMP_NUM_THREADS": "1"})
    assert expected.returncode == 0, expected.stderr
    found = auto.run("-n", str(ranks), "--auto", script.name)
    assert differences(_result(plain, expected), _result(auto, found), TOLERANCE.get(name, 1e-10)) == [], found.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in (CORPUS / "refused").glob("*.py")))
def test_a_script_that_cannot_be_kept_is_refused_in_words(command: Command, name: str) -> None:
    shutil.copy(CORPUS / "refused" / f"{name}.py", command.folder)
    ended = command.run("-n", "2", "--auto", f"{name}.py")
    assert ended.returncode != 0
    assert REFUSED[name] in ended.stderr
