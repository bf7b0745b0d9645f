# SPDX-License-Identifier: Apache-2.0
"""What Slurm adds: its steps, and ``rankwise submit``."""
