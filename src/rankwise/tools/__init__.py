# SPDX-License-Identifier: Apache-2.0
"""Tools on top of the library: a script for one device, unedited, on several ranks."""
