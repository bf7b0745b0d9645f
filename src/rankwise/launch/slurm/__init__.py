# SPDX-License-Identifier: Apache-2.0
"""Support for Slurm: its steps, and ``rankwise submit``."""
