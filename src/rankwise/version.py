# SPDX-License-Identifier: Apache-2.0
"""The version of this package: compared between the machines of one job. Imports nothing."""

VERSION = "0.2.0"
