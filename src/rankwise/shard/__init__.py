# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and optimizer state in parts, one per rank."""
