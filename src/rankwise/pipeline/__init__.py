# SPDX-License-Identifier: Apache-2.0
"""Stages of a model on different ranks."""
