# SPDX-License-Identifier: Apache-2.0
"""The version of this package: what machines of one job compare. Imports nothing."""

VERSION = "0.2.0"
