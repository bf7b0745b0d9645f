# SPDX-License-Identifier: Apache-2.0
"""The colors of charts, on light and dark screens, as CSS: for a page of several, and for a picture by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_KEYS = 8
"""How many colors there are for things of one kind."""
_LIGHT = {
    "text": "#1f2328",
    "back": "#ffffff",
    "soft": "#59636e",
    "line": "#d1d9e0",
    "card": "#f6f8fa",
    "script": "#8c959f",
    "data": "#bf8700",
    "forward": "#0969da",
    "backward": "#54aeff",
    "exchange": "#8250df",
    "waiting": "#cf222e",
    "optimizer": "#1a7f37",
    "checkpoint": "#bc4c00",
    "evaluation": "#57606a",
    "heat-low": "#ddf4ff",
    "heat-high": "#0a3069",
}
_DARK = {
    "text": "#e6edf3",
    "back": "#0d1117",
    "soft": "#9198a1",
    "line": "#3d444d",
    "card": "#151b23",
    "script": "#656c76",
    "data": "#d29922",
    "forward": "#1f6feb",
    "backward": "#79c0ff",
    "exchange": "#a371f7",
    "waiting": "#f85149",
    "optimizer": "#3fb950",
    "checkpoint": "#db6d28",
    "evaluation": "#8b949e",
    "heat-low": "#0c2d6b",
    "heat-high": "#cae8ff",
}
_PARTS = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "script", "checkpoint", "evaluation")
_KEYS = ("forward", "waiting", "optimizer", "data", "exchange", "checkpoint", "backward", "script")
NUM_SHADES = 8
"""How many shades a map has."""


def page_style() -> str:
    """Return the style of a page's charts, and the variables ``--text``, ``--back`` and others for the rest of it."""
    return "\n".join(
        [
            f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}",
            *_rules(lambda name: f"var(--{name})"),
        ]
    )


def picture_style() -> str:
    """Return the style of a picture by itself, without variables: not every program that shows SVG knows them."""
    return "\n".join(
        [*_rules(_LIGHT.__getitem__), "@media (prefers-color-scheme: dark) {", *_rules(_DARK.__getitem__), "}"]
    )


def _variables(colors: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {color}" for name, color in colors.items())


def _rules(color: Callable[[str], str]) -> list[str]:
    shares = [round(100 * shade / (NUM_SHADES - 1)) for shade in range(NUM_SHADES)]
    return [
        f"svg text {{ font: 12px system-ui, sans-serif; fill: {color('soft')} }}",
        *(_filled(part, color(part)) for part in _PARTS),
        *(_filled(f"key{number}", color(name)) for number, name in enumerate(_KEYS)),
        *(
            f".heat{shade} {{ fill: color-mix(in oklab, {color('heat-high')} {share}%, {color('heat-low')}) }}"
            for shade, share in enumerate(shares)
        ),
        *(f".curve{number} {{ stroke: {color(name)} }}" for number, name in enumerate(_KEYS)),
        f".curve {{ fill: none; stroke-width: 1.6 }} .grid {{ stroke: {color('line')} }}",
        f".cell {{ stroke: {color('back')}; stroke-width: 1 }} svg text.in {{ fill: {color('back')} }}",
        f".back {{ fill: {color('back')} }} svg text.title {{ font-size: 14px; fill: {color('text')} }}",
    ]


def _filled(style: str, color: str) -> str:
    return f".{style} {{ fill: {color}; background: {color} }}"
