# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto``: every rank runs the whole script, and splits the calls of modules by the rows of a batch."""
