# SPDX-License-Identifier: Apache-2.0
"""``--hosts``: all machines from one of them, over ssh."""
