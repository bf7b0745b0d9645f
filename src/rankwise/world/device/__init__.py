# SPDX-License-Identifier: Apache-2.0
"""What depends on the type of accelerator: which one is here, its backend, streams, memory, random numbers."""
