# SPDX-License-Identifier: Apache-2.0
"""Strategies: a folder or file for each way to distribute a model over ranks, and what they share."""
