# SPDX-License-Identifier: Apache-2.0
"""What is said of how ranks ended."""
