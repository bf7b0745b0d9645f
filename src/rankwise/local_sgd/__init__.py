# SPDX-License-Identifier: Apache-2.0
"""Worker groups that train on their own, and are averaged every few steps."""
