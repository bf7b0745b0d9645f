# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text, with the colors and units of every picture of rankwise. Values in, text out; writes no file."""
