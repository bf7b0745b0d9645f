# SPDX-License-Identifier: Apache-2.0
"""Layers of a model on different devices of one process."""
