# SPDX-License-Identifier: Apache-2.0
"""Tensors as values: in files that are complete or absent, as other libraries' arrays, compared between replicas."""
