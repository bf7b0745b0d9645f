# SPDX-License-Identifier: Apache-2.0
"""One copy per host: the ranks of a host share a model's parameters, and each updates a part of them."""
