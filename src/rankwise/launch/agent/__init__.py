# SPDX-License-Identifier: Apache-2.0
"""One per machine: starts its ranks, monitors them, forwards their output, terminates what does not exit."""
