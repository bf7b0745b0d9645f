# SPDX-License-Identifier: Apache-2.0
"""Islands of ranks that train on their own, and are averaged seldom. ``calls`` holds the public call."""
