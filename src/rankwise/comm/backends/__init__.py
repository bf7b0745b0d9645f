# SPDX-License-Identifier: Apache-2.0
"""How tensors travel between ranks."""
