"""A chart that is drawn in the page's own colours, light or dark."""

from collections.abc import Mapping, Sequence
from html import escape

SHAPES = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {paint}/>',
    '<rect x="{left:.1f}" y="{top:.1f}" width="9" height="9" {paint}/>',
    '<path d="M{x:.1f} {up:.1f}l6 6l-6 6l-6 -6z" {paint}/>',
    '<path d="M{x:.1f} {up:.1f}l6 11h-12z" {paint}/>',
)
COLOURS = 6
LEFT, RIGHT, ROW, TOP = 150, 20, 24, 12
WIDTH = 760


def dots(
    rows: Sequence[str], values: Mapping[str, Sequence[float]], lines: Mapping[str, float], alt: str
) -> str:
    """Shares from 0 to 1: a row for each of ``rows``, a mark for each name, and a dashed line for each."""
    bottom = TOP + ROW * len(rows)
    legend = bottom + 46
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {legend + 22 * ((len(values) + 1) // 2)}" role="img" '
        f'aria-label="{escape(alt)}">'
    ]
    for tick in range(0, 101, 20):
        x = _place(tick / 100)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="var(--line)"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    axis = "error (%); dashed: clean images"
    parts.append(f'<text x="{middle:.1f}" y="{bottom + 32}" text-anchor="middle">{axis}</text>')
    for i, name in enumerate(lines):
        x = _place(lines[name])
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="{_colour(i)}" '
            'stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
    for row, label in enumerate(rows):
        y = TOP + ROW * (row + 0.5)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)" '
            'stroke-dasharray="1 4"/>'
        )
        parts += [_mark(i, _place(values[name][row]), y) for i, name in enumerate(values)]
    for i, name in enumerate(values):
        x, y = LEFT + 290 * (i % 2), legend + 22 * (i // 2)
        parts.append(_mark(i, x, y))
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts) + "</svg>"


def _place(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _colour(i: int) -> str:
    return f"var(--c{i % COLOURS})"


def _mark(i: int, x: float, y: float) -> str:
    paint = f'fill="{_colour(i)}" stroke="var(--page)"'
    return SHAPES[i % len(SHAPES)].format(x=x, y=y, left=x - 4.5, top=y - 4.5, up=y - 6, paint=paint)
