# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: directories that are complete or absent, verified by checksum, without pickle."""
