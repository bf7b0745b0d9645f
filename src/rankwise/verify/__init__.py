# SPDX-License-Identifier: Apache-2.0
"""``rankwise verify``: run a script on one rank and on N, and name the first difference, its cause and its fix.

``procedure`` orders the runs, ``runs`` runs the script on ranks, in which ``recorder`` writes ``records``. From these,
without torch, ``compare`` finds differences, ``causes`` and ``mistakes`` their causes, and ``conclude`` the verdict,
which ``report`` shows. Nothing in the script changes.
"""
