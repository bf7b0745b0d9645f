# SPDX-License-Identifier: Apache-2.0
"""Tools on top of the library: ``auto`` runs an unedited script on several ranks, ``verify`` compares N with one."""
