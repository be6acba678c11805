"""Score against latency, a panel per rate: points further to the lower right are better."""

from collections.abc import Mapping
from html import escape

WIDTH, HEIGHT, MARGIN = 360, 300, 48
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#000000")
Point = tuple[float, float]
"""Score in percent, and milliseconds per token."""


def draw(panels: Mapping[str, Mapping[str, list[Point]]]) -> str:
    """Per panel and policy the points of its settings, joined in order. An SVG."""
    names = list(dict.fromkeys(name for policies in panels.values() for name in policies))
    colours = dict(zip(names, (COLOURS * len(names))[: len(names)], strict=True))
    height = HEIGHT + 18 * len(names) + 10
    parts = [
        _panel(at * WIDTH, title, policies, colours)
        for at, (title, policies) in enumerate(panels.items())
    ]
    legend = [
        (
            f'<text x="{MARGIN}" y="{HEIGHT + 18 * (at + 1)}" fill="{colours[name]}">&#9679; '
            f"{escape(name)}</text>"
        )
        for at, name in enumerate(names)
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH * len(panels)}" '
        f'height="{height}" font-size="12"'
    )
    return "\n".join(
        [
            f'{head} font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>',
            *parts,
            *legend,
            "</svg>",
        ]
    )


def _panel(
    left: float, title: str, policies: Mapping[str, list[Point]], colours: Mapping[str, str]
) -> str:
    points = [point for found in policies.values() for point in found]
    low, high = min(x for x, _ in points) - 1, max(x for x, _ in points) + 1
    top = 1.08 * max(y for _, y in points)
    inner, tall = WIDTH - 1.5 * MARGIN, HEIGHT - 2 * MARGIN

    def place(point: Point) -> tuple[float, float]:
        return left + MARGIN + inner * (point[0] - low) / (high - low), MARGIN + tall * (
            1 - point[1] / top
        )

    axes = (
        f'<path d="M{left + MARGIN} {MARGIN}v{tall}h{inner}" fill="none" stroke="#999"/>'
        f'<text x="{left + MARGIN}" y="{MARGIN - 14}" font-weight="bold">{escape(title)}</text>'
        f'<text x="{left + MARGIN}" y="{HEIGHT - MARGIN + 16}">{low:.0f} % right</text>'
        f'<text x="{left + MARGIN + inner}" y="{HEIGHT - MARGIN + 16}" '
        f'text-anchor="end">{high:.0f} %</text>'
        f'<text x="{left + MARGIN - 4}" y="{MARGIN + 4}" text-anchor="end">{top:.0f}</text>'
        f'<text x="{left + 4}" y="{MARGIN + tall / 2}">ms/tok</text>'
    )
    return axes + "".join(
        _line([place(point) for point in found], colours[name]) for name, found in policies.items()
    )


def _line(points: list[tuple[float, float]], colour: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}"/>{dots}'
