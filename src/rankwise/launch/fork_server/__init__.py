# SPDX-License-Identifier: Apache-2.0
"""Forks ranks from a process that has torch in memory; and what a rank does from its fork to its exit."""
