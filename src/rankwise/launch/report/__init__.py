# SPDX-License-Identifier: Apache-2.0
"""Reports on how ranks exited."""
