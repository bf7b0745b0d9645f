# SPDX-License-Identifier: Apache-2.0
"""``rankwise verify``: run a script on one rank and on N, and name the first difference, its cause and its fix.

``runs`` runs the script, ``rank`` is what each rank of it runs, ``recorder`` writes ``records``, ``compare`` finds the
first difference in them and ``causes`` its cause. Nothing in the script changes.
"""
