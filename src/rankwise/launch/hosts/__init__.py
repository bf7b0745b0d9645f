# SPDX-License-Identifier: Apache-2.0
"""``--hosts``: starts all machines from one, over ssh."""
