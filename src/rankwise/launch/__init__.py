# SPDX-License-Identifier: Apache-2.0
"""Starting and supervising the ranks of this machine."""
