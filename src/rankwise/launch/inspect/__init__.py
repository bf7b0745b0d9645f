# SPDX-License-Identifier: Apache-2.0
"""``rankwise stacks``: asks a running job what its ranks are doing."""
