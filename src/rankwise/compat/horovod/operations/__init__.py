# SPDX-License-Identifier: Apache-2.0
"""Horovod's operations on tensors and objects."""
