# SPDX-License-Identifier: Apache-2.0
"""What a run has recorded of itself, for people: the report as a page, the timeline, the causes of slow steps."""
