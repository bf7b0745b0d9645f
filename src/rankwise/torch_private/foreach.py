# SPDX-License-Identifier: Apache-2.0
"""One call for many tensors, in place. torch has no public form of these."""

from __future__ import annotations

import torch

copy_ = torch._foreach_copy_
"""Copy each of the second list into its place in the first."""
zero_ = torch._foreach_zero_
"""Fill each with zeros."""
add_ = torch._foreach_add_
"""Add a list of tensors, each multiplied by ``alpha``."""
sub_ = torch._foreach_sub_
"""Subtract a list of tensors."""
mul_ = torch._foreach_mul_
"""Multiply each by a number."""
div_ = torch._foreach_div_
"""Divide each by a number."""
