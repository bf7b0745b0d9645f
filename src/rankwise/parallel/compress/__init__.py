# SPDX-License-Identifier: Apache-2.0
"""Gradients that travel as fewer bytes than they have. Used by replicate."""
