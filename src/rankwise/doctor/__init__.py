# SPDX-License-Identifier: Apache-2.0
"""Finds problems of machines before training starts: facts of every rank, evaluated separately from gathering them.

A check is one function in ``checks`` and a line in its table. Changes nothing on the machine. Imported by ``cli``.
"""
