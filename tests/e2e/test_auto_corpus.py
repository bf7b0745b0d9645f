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
    "cannot_be_copied",
    "carried_state_lstm",
    "center_loss",
    "chance_in_forward",
    "class_attribute",
    "compiled",
    "ewc_continual",
    "features_on_self",
    "flat_scores",
    "functional_models",
    "global_counter",
    "global_rng",
    "gpt_with_loss",
    "gradcam",
    "gradient_checkpointing",
    "grads_of_inputs",
    "graph_scatter",
    "hessian_power",
    "history_on_model",
    "hook_added_removed",
    "jacobians",
    "jit_saved",
    "jit_scripted",
    "jit_traced",
    "last_batch_of_one",
    "late_padding",
    "lengths_and_dropout",
    "log_of_everything",
    "magnitude_masks",
    "maml_fast_weights",
    "maml_functional",
    "matrix_factorization",
    "mixture_of_experts",
    "moco_queue",
    "mode_switch",
    "monkeypatched",
    "neural_ode",
    "norms",
    "old_weight_norm",
    "outputs_in_place",
    "packed_sequences",
    "padded_mean",
    "penalties_gan",
    "pinn",
    "print_in_forward",
    "progan_minibatch_std",
    "pruning",
    "rare_branch",
    "reached_values",
    "reverse_sequences",
    "rezero_accumulation",
    "rezero_intersample",
    "ring_of_friends",
    "settings_of_torch",
    "state_before_training",
    "stochastic_depth",
    "style_input",
    "tensors_elsewhere",
    "trainer_callbacks",
    "uncaught_error",
    "unusual_modules",
    "vectorized_jacobian",
    "vit",
    "vqvae_ema",
    "wgan_gp",
    "words_nearby",
}
"""Scripts with a module that runs whole on some number of ranks; of the others every call is split."""
REFUSED = {"own_process_group": "ConfigurationError: The script opens a process group of its own"}
ALWAYS = {"RANKWISE_AUTO_SPLIT": "always"}
"""Split calls of small models too, which saves no time."""


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
    found = auto.run("-n", str(ranks), "--auto", f"{name}.py", env=ALWAYS)
    assert differences(_result(plain, expected), _result(auto, found), TOLERANCE.get(name, 1e-10)) == [], found.stderr
    assert name in PARTLY_WHOLE or "runs whole" not in found.stderr, found.stderr


def test_standard_input_belongs_to_the_script(command: Command) -> None:
    results = []
    for name, words in ("plain", []), ("auto", ["-m", "rankwise", "run", "-n", "2", "--auto"]):
        ours = command.inside(name)
        _put("standard_input", ours.folder)
        ended = ours.python(
            *words,
            "standard_input.py",
            env={"OMP_NUM_THREADS": "1", **ALWAYS},
            text="3\n0.2\n5\n0.1 0.5 -0.7 0.3 0.9\n-0.2 -0.4 0.6 0.8\n",
        )
        results.append(_result(ours, ended))
    assert "9 numbers follow" in results[0].stdout
    assert differences(*results) == []


def test_each_script_that_is_to_be_refused_has_its_words() -> None:
    assert sorted(REFUSED) == sorted(path.stem for path in (CORPUS / "refused").glob("*.py"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_script_that_cannot_be_kept_is_refused_in_words(command: Command, name: str) -> None:
    shutil.copy(CORPUS / "refused" / f"{name}.py", command.folder)
    ended = command.run("-n", "2", "--auto", f"{name}.py")
    assert ended.returncode == 1
    assert REFUSED[name] in ended.stderr
