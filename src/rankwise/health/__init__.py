# SPDX-License-Identifier: Apache-2.0
"""Why a wait cannot end: what ranks report, how failures are detected, and how they are described."""
