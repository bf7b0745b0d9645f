# SPDX-License-Identifier: Apache-2.0
"""What started this process, and which variables show it: one ordered table, a file per environment.

No torch. Determines only facts about the start; opens nothing. Used by ``join`` and by the launcher.
"""
