# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises the ranks of this machine."""
