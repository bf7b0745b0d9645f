# SPDX-License-Identifier: Apache-2.0
"""Tools that run a user's script and look at what it does. ``verify`` compares N ranks with one."""
