# SPDX-License-Identifier: Apache-2.0
"""One per machine: starts its ranks, watches them, passes on what they write, ends what does not end."""
