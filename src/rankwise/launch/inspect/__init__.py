# SPDX-License-Identifier: Apache-2.0
"""``rankwise stacks`` and ``rankwise top``: ask a running job what its ranks are doing."""
