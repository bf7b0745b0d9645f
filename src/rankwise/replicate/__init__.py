# SPDX-License-Identifier: Apache-2.0
"""Data parallelism, and what all strategies stand on: gradient buckets, hooks, a step's weight, random numbers."""
