"""Prints a table that compares figures with the figures of an earlier run, and draws the figures as a picture."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from scripts.benchmark.figures import Row

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 30, 50
SERIES: tuple[tuple[str, str, tuple[str, ...], float, str], ...] = (
    ("start: ipvsproxy", "start", ("wall s, best",), 1.0, "#1f6feb"),
    ("start: the kernel alone", "start", ("replay s, best",), 1.0, "#8b949e"),
    ("ipvsadm -R and ipset restore", "tools", ("ipvsadm -R s", "ipset restore s"), 1.0, "#d29922"),
    ("one endpoint changes", "change", ("p50 ms",), 1e-3, "#2da44e"),
)
"""The lines of the picture. Each line has, in this order: its label; the first word in the names of its cases; the names of its
figures; the unit of these figures in seconds; its colour. If a line has several figures, their sum is drawn."""
ENDPOINTS = {"10", "1"}
"""The picture shows only cases with these numbers of endpoints per Service. 100,000 Services are measured only with one endpoint
each."""


def table(rows: Iterable[Row], before: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Returns one line per figure; the last column is the value relative to the value of the earlier run."""
    yield f"{'case':<18} {'figure':<44} {'value':>12} {'target':>8}  {'':<4} {'before':>12}  relative"
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        verdict = "MISS" if not row.ok else "" if row.target is None else "ok"
        old = before.get((row.case, row.figure))
        value = "" if row.value is None else f"{row.value:.4g}"
        beside = (
            "" if old is None else f"{old:12.4g}  {row.value / old:8.2f}" if old and row.value is not None else f"{old:12.4g}"
        )
        yield f"{row.case:<18} {row.figure:<44} {value:>12} {target:>8}  {verdict:<4} {beside}".rstrip()


def picture(rows: Sequence[Row]) -> str:
    """Returns an SVG plot with logarithmic axes, which shows the measured seconds against the number of Services."""
    series = [(label, colour, list(_points(rows, case, figures, unit))) for label, case, figures, unit, colour in SERIES]
    points = [point for _, _, found in series for point in found]
    if not points:
        return ""
    x_low, x_high = _decades(x for x, _ in points)
    y_low, y_high = _decades(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x_low) / (x_high - x_low)
        up = (math.log10(y) - y_low) / (y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    return "\n".join((*_frame(place, (x_low, x_high), (y_low, y_high)), *_lines(place, series), "</svg>", ""))


def _points(rows: Sequence[Row], case: str, figures: Sequence[str], unit: float) -> Iterator[tuple[float, float]]:
    found: dict[int, float] = {}
    for row in rows:
        kind, _, size = row.case.partition(" ")
        services, _, endpoints = size.partition("x")
        if kind == case and endpoints in ENDPOINTS and row.figure in figures and row.value is not None:
            found[int(services)] = found.get(int(services), 0.0) + row.value * unit
    yield from sorted(found.items())


def _decades(values: Iterable[float]) -> tuple[int, int]:
    logarithms = [math.log10(value) for value in values]
    low = math.floor(min(logarithms))
    return low, max(low + 1, math.ceil(max(logarithms)))


def _frame(place, x_range: tuple[int, int], y_range: tuple[int, int]) -> Iterator[str]:  # type: ignore[no-untyped-def]  # place is a local function
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#57606a">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    for power in range(x_range[0], x_range[1] + 1):
        x, bottom = place(10.0**power, 10.0 ** y_range[0])
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#d0d7de"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle">{10**power:,}</text>'
    for power in range(y_range[0], y_range[1] + 1):
        left, y = place(10.0 ** x_range[0], 10.0**power)
        yield f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>'
        yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{_seconds(power)}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">Services</text>'


def _seconds(power: int) -> str:
    return f"{10 ** (power + 3)} ms" if power < 0 else f"{10**power} s"


def _lines(place, series: Sequence[tuple[str, str, list[tuple[float, float]]]]) -> Iterator[str]:  # type: ignore[no-untyped-def]  # place is a local function
    for label, colour, found in series:
        placed = [place(*point) for point in found]
        if not placed:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in placed:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        x, y = placed[-1]
        yield f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{label}</text>'
