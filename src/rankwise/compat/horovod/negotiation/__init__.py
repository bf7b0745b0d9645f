# SPDX-License-Identifier: Apache-2.0
"""How operations of the ranks are matched by their names before they travel."""
