# SPDX-License-Identifier: Apache-2.0
"""``DistributedOptimizer``: gradients travel while backward runs."""
