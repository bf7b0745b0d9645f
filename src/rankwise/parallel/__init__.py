# SPDX-License-Identifier: Apache-2.0
"""The ways of spreading a model over ranks, one per file."""
