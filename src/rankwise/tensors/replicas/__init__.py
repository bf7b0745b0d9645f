# SPDX-License-Identifier: Apache-2.0
"""What replicas of a model have in common, as values to compare: the bits of tensors, the settings of optimizers."""
