# SPDX-License-Identifier: Apache-2.0
"""Large layers in parts, one per rank."""
