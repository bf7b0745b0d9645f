# SPDX-License-Identifier: Apache-2.0
"""The report as one self-contained HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.tools.verify.verdict import Report


def page_of(report: Report) -> str:
    """Return the page."""
    return report.script
