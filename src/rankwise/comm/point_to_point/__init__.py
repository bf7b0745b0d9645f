# SPDX-License-Identifier: Apache-2.0
"""Values from one rank to another, and gradients back: the tensors of a graph that lives on several ranks."""
