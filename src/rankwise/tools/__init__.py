# SPDX-License-Identifier: Apache-2.0
"""Tools on top of the library, for scripts as they are: ``auto`` runs one for one device on several ranks, ``verify``
compares N ranks of one with one rank.
"""
