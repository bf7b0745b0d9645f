# SPDX-License-Identifier: Apache-2.0
"""What is wrong with these machines before a training starts: facts of every rank, judged apart from their gathering.

A check is one function of ``checks`` and a line in its table. Changes nothing on the machine. Imported by ``cli``.
"""
