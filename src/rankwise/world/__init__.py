# SPDX-License-Identifier: Apache-2.0
"""What this process is: its rank, its machine and devices, and what started it. Opens nothing."""
