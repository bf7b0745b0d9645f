# SPDX-License-Identifier: Apache-2.0
"""Gradients that are sent as fewer bytes than they have. Used by replicate."""
