# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto`` prints and writes what plain Python does, for scripts as strangers write them.

``tests/corpus`` holds the scripts; none knows of rankwise. Exit code, output and every file are compared, numbers to
1e-10 (``tests/same_result.py``). A script's modules and files are in ``tests/corpus/beside``, in a folder of its name.
"""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.same_result import Result, differences

if TYPE_CHECKING:
    import subprocess

    from conftest import Command

CORPUS = Path(__file__).parents[1] / "corpus"
SCRIPTS = sorted(path.stem for path in CORPUS.glob("*.py"))
BEFORE_BATCHNORM = 1e-7
"""The gradient of a bias before BatchNorm is rounding alone, which Adam makes steps of: plain Python differs as much
between one thread and two."""
TOLERANCE = {
    "accumulation": BEFORE_BATCHNORM,
    "byol": BEFORE_BATCHNORM,
    "cnn_batchnorm": BEFORE_BATCHNORM,
    "kfold": BEFORE_BATCHNORM,
    "amp_bf16": 0.03,  # it computes in bfloat16, with 8 bits: sums of fewer rows round to other numbers
}
EXIT_CODE = {"background_writers": 1, "early_exit": 3, "interrupted_and_finally": 130, "uncaught_error": 1}
ON_EACH = {"digits_mlp", "carried_state_lstm", "short_cuts", "wgan_gp", "resume_training"}
"""Scripts that run on 2, 3 and 4 ranks; the others on 2 or 3."""
CASES = [
    (name, ranks)
    for name in SCRIPTS
    for ranks in ([2, 3, 4] if name in ON_EACH else [2 + zlib.crc32(name.encode()) % 2])
]
PARTLY_WHOLE = {
    "activation_hooks",
    "bayes_by_backprop",
    "bucket_batches",
    "byol",
    "carried_state_lstm",
    "center_loss",
    "compiled",
    "ewc_continual",
    "features_on_self",
    "global_counter",
    "global_rng",
    "gradcam",
    "gradient_checkpointing",
    "gpt_with_loss",
    "graph_scatter",
    "history_on_model",
    "jit_saved",
    "jit_scripted",
    "jit_traced",
    "last_batch_of_one",
    "late_padding",
    "maml_fast_weights",
    "matrix_factorization",
    "mixture_of_experts",
    "moco_queue",
    "mode_switch",
    "neural_ode",
    "norms",
    "old_weight_norm",
    "padded_mean",
    "print_in_forward",
    "progan_minibatch_std",
    "pruning",
    "rare_branch",
    "reverse_sequences",
    "rezero_accumulation",
    "rezero_intersample",
    "ring_of_friends",
    "stochastic_depth",
    "style_input",
    "trainer_callbacks",
    "vit",
    "vqvae_ema",
    "words_nearby",
}
"""Scripts with a module that runs whole on some number of ranks; of the others every call is split."""
PROGRAM = "ConfigurationError: The script starts a program"
DIFFER = "ReplicasDiffer: Linear has different arguments on different ranks"
REFUSED = {
    "dated_folder": "ConfigurationError: mkdir names different files on different ranks",
    "own_process_group": "ConfigurationError: The script opens a process group of its own",
    "own_subprocess": PROGRAM,
    "shared_processes": PROGRAM,
    "spawn_workers": PROGRAM,
    "sqlite_log": "ConfigurationError: The script opens a database with sqlite3",
    "time_budget": DIFFER,
    "unseeded_initialisation": "ReplicasDiffer: Linear has different parameters on different ranks",
    "unseeded_numpy": DIFFER,
    "unseeded_torch": "ReplicasDiffer: Sequential has different arguments on different ranks",
}


def _put(name: str, folder: Path) -> None:
    shutil.copy(CORPUS / f"{name}.py", folder)
    if (CORPUS / "beside" / name).is_dir():
        shutil.copytree(CORPUS / "beside" / name, folder, dirs_exist_ok=True)


def _result(command: Command, ended: subprocess.CompletedProcess[str]) -> Result:
    return Result(ended.returncode, ended.stdout, command.folder)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_a_script_gives_what_plain_python_gives(command: Command, name: str, ranks: int) -> None:
    plain, auto = command.inside("plain"), command.inside("auto")
    _put(name, plain.folder)
    _put(name, auto.folder)
    expected = plain.python(f"{name}.py", env={"OMP_NUM_THREADS": "1"})
    assert expected.returncode == EXIT_CODE.get(name, 0), expected.stderr
    found = auto.run("-n", str(ranks), "--auto", f"{name}.py")
    assert differences(_result(plain, expected), _result(auto, found), TOLERANCE.get(name, 1e-10)) == [], found.stderr
    assert name in PARTLY_WHOLE or "runs whole" not in found.stderr, found.stderr


def test_each_script_that_is_to_be_refused_has_its_words() -> None:
    assert sorted(REFUSED) == sorted(path.stem for path in (CORPUS / "refused").glob("*.py"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_kept_is_refused_in_words(command: Command, name: str) -> None:
    shutil.copy(CORPUS / "refused" / f"{name}.py", command.folder)
    ended = command.run("-n", "2", "--auto", f"{name}.py")
    assert ended.returncode == 1
    assert REFUSED[name] in ended.stderr
