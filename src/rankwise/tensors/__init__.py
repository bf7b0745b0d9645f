# SPDX-License-Identifier: Apache-2.0
"""Tensors as values: in files, as other libraries' arrays, compared between replicas."""
