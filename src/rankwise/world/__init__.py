# SPDX-License-Identifier: Apache-2.0
"""What this process is: its rank and ranks, the machine, its devices, who started it. Opens nothing."""
