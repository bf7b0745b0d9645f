# SPDX-License-Identifier: Apache-2.0
"""One per job: decides which machines and ranks an attempt has, when it starts, restarts and ends."""
