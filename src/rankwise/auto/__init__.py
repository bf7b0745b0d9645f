# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto``: rank zero runs the script; all ranks compute calls of its modules, by rows of a batch."""
