# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto``: every rank runs the whole script, and calls of modules are split by the rows of the batch."""
