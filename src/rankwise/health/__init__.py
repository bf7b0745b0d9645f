# SPDX-License-Identifier: Apache-2.0
"""Why a wait cannot end: what ranks report, how failures are noticed, and what is said of them."""
