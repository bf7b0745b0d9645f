# SPDX-License-Identifier: Apache-2.0
"""Runs a training of rankwise, as it is, in the workers of Ray Train's TorchTrainer.

Arguments: the address of the cluster, the folder of the training, the number of workers.
"""

import sys
from pathlib import Path

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from training import main

ray.init(address=sys.argv[1], log_to_driver=False)
folder = Path(sys.argv[2])
TorchTrainer(
    lambda: main(folder),
    scaling_config=ScalingConfig(num_workers=int(sys.argv[3])),
    run_config=RunConfig(storage_path=str(folder / "storage")),
).fit()
