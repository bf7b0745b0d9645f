# SPDX-License-Identifier: Apache-2.0
"""Durations, amounts of memory and speeds in the unit in which they are easily read."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration with three digits: ``12.3 ms``."""
    if seconds == 0.0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def memory(num_bytes: float) -> str:
    """Return a number of bytes with three digits: ``1.25 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{_three_digits(num_bytes / 2**10)} KiB"


def speed(bytes_per_second: float) -> str:
    """Return a speed with three digits: ``1.25 MB/s``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= size:
            return f"{_three_digits(bytes_per_second / size)} {unit}"
    return f"{_three_digits(bytes_per_second / 1e3)} kB/s"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"  # noqa: PLR2004
