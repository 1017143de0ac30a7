"""The plots of the page: one drawing per scenario with time, memory and traffic of each contestant beside each other.

Drawings are SVG without styles of their own: colours are the page's, for light, dark and paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import attrs

from shardrt.bench.telling import Document, by_level, megabytes, milliseconds

_ROW = 25.0
_BAR = 16.0
_LEVEL = 25.0
_TOP = 44.0
_BOTTOM = 12.0
_WIDTH = 1180.0
_LABELS = 266.0
_LEAST_FOR_TEXT = 34.0
_RAIL = 96.0
_MOST_RATIO = 2.0


@attrs.frozen(kw_only=True)
class Panel:
    """A part of the drawing with a scale of its own, from zero."""

    left: float
    width: float
    most: float
    """The largest number that fits."""
    title: str

    def length(self, value: float) -> float:
        """How far a number goes from the left."""
        return self.width * min(value / self.most, 1.0) if self.most > 0 else 0.0


def draw_scenario(scenario: Document, name: str) -> str:
    """One drawing: for each contestant a stacked bar of a step, its peak of memory and its traffic."""
    rows = [row for _, level in by_level(scenario) for row in level]
    time = Panel(left=_LABELS, width=504, most=_time_scale(rows), title="Step time, ms")
    memory = Panel(left=826, width=104, most=_largest(rows, "peak_bytes"), title="Peak memory, MB")
    traffic = Panel(left=1006, width=104, most=_largest(rows, "wire_bytes_per_step"), title="Traffic per step, MB")
    body, y = [], _TOP
    for title, level in by_level(scenario):
        body.append(f'<text class="level" x="0" y="{y + 16:.1f}">{escape(title)}</text>')
        y += _LEVEL
        for row in level:
            body += _row(row, y, time, memory, traffic)
            y += _ROW
    height = y + _BOTTOM
    behind = [*_axis(time, y), *_heads(time, memory, traffic)]
    before = _limits(rows, time, y)
    told = escape(f"Step time, peak memory and traffic: {scenario['title']}")
    drawn = "".join((*behind, *body, *before))
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-labelledby="{name}-plot">'
        f'<title id="{name}-plot">{told}; the table below has the numbers</title>{drawn}</svg>'
    )


def draw_ratio(value: float) -> str:
    """A small bar for a ratio, with a mark at one.

    Example:
        >>> from shardrt.bench.page_charts import draw_ratio
        >>> 'class="less"' in draw_ratio(0.5), 'class="more"' in draw_ratio(1.5)
        (True, True)
    """
    long, one = _RAIL * min(value, _MOST_RATIO) / _MOST_RATIO, _RAIL / _MOST_RATIO
    kind = "less" if value < 1 else "more"
    return (
        f'<svg viewBox="0 0 {_RAIL:.0f} 6" aria-hidden="true">'
        f'<rect class="rail" width="{_RAIL:.0f}" height="6" rx="3"/>'
        f'<rect class="{kind}" width="{long:.1f}" height="6" rx="3"/>'
        f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="0" y2="6"/></svg>'
    )


def ticks(most: float) -> list[float]:
    """Round numbers from zero to the largest, some five of them.

    Example:
        >>> from shardrt.bench.page_charts import ticks
        >>> ticks(2300.0), ticks(7.5)
        ([0.0, 500.0, 1000.0, 1500.0, 2000.0], [0.0, 2.0, 4.0, 6.0])
    """
    if not most > 0:
        return [0.0]
    size = 10.0 ** math.floor(math.log10(most))
    step = next(one for one in (size / 5, size / 2, size, 2 * size, 5 * size) if most / one <= 5)
    return [number * step for number in range(math.floor(most / step) + 1)]


def _row(row: Document, y: float, time: Panel, memory: Panel, traffic: Panel) -> Iterator[str]:
    ours = " ours" if row["ours"] else ""
    middle = y + _ROW / 2 + 4.3
    if ours:
        yield f'<rect class="wash" x="-6" y="{y:.1f}" width="{_WIDTH + 6:.0f}" height="{_ROW:.1f}" rx="4"/>'
    yield f'<text class="label{ours}" x="10" y="{middle:.1f}">{escape(row["label"])}</text>'
    yield from _stacked(row, y + (_ROW - _BAR) / 2, middle, time)
    for panel, field, kind in ((memory, "peak_bytes", "memory"), (traffic, "wire_bytes_per_step", "traffic")):
        yield from _single(row, field, y + (_ROW - _BAR) / 2, middle, panel, f"{kind}{'' if ours else ' peer'}")


def _stacked(row: Document, top: float, middle: float, panel: Panel) -> Iterator[str]:
    x = panel.left
    for kind, told in (("compute", "compute"), ("exposed", "exposed communication"), ("update", "optimizer step")):
        value = row[f"{kind}_ms"]
        long = panel.length(value)
        yield (
            f'<rect class="{kind}" x="{x:.1f}" y="{top:.1f}" width="{long:.1f}" height="{_BAR:.1f}">'
            f"<title>{escape(row['label'])}: {told} {milliseconds(value)} ms</title></rect>"
        )
        if long >= _LEAST_FOR_TEXT:
            yield (
                f'<text class="on-{kind}" x="{x + long / 2:.1f}" y="{middle - 0.4:.1f}" text-anchor="middle">'
                f"{milliseconds(value)}</text>"
            )
        x += long
    low, high = (panel.left + panel.length(one) for one in row["ms_per_step_quartiles"])
    center = top + _BAR / 2
    if high - low > 1.5:
        yield f'<line class="spread" x1="{low:.1f}" x2="{high:.1f}" y1="{center:.1f}" y2="{center:.1f}"/>'
        for end in (low, high):
            yield f'<line class="spread" x1="{end:.1f}" x2="{end:.1f}" y1="{center - 3:.1f}" y2="{center + 3:.1f}"/>'
    yield (f'<text class="total" x="{max(x, high) + 7:.1f}" y="{middle:.1f}">{milliseconds(row["ms_per_step"])}</text>')


def _single(row: Document, field: str, top: float, middle: float, panel: Panel, kind: str) -> Iterator[str]:
    value = row[field]
    if value is None:
        yield f'<text class="quiet" x="{panel.left:.1f}" y="{middle:.1f}">not counted here</text>'
        return
    long = max(panel.length(value), 1.0)
    yield f'<rect class="{kind}" x="{panel.left:.1f}" y="{top:.1f}" width="{long:.1f}" height="{_BAR:.1f}"/>'
    yield f'<text x="{panel.left + long + 6:.1f}" y="{middle:.1f}">{megabytes(value)}</text>'


def _time_scale(rows: Sequence[Document]) -> float:
    """With room for the number behind the longest bar, and for the wire's limit."""
    longest = max(max(row["ms_per_step"], row["ms_per_step_quartiles"][1], row["wire_limit_ms"] or 0.0) for row in rows)
    return float(longest) * 1.12


def _largest(rows: Sequence[Document], field: str) -> float:
    return float(max((row[field] or 0.0) for row in rows))


def _heads(*panels: Panel) -> Iterator[str]:
    for panel in panels:
        yield f'<text class="head" x="{panel.left:.1f}" y="14">{panel.title}</text>'
        yield f'<line class="axis" x1="{panel.left:.1f}" x2="{panel.left:.1f}" y1="{_TOP - 6:.1f}" y2="{_TOP:.1f}"/>'


def _axis(panel: Panel, bottom: float) -> Iterator[str]:
    for tick in ticks(panel.most):
        x = panel.left + panel.length(tick)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6:.1f}" y2="{bottom:.1f}"/>'
        anchor = "start" if tick == 0 else "middle"
        yield f'<text class="quiet" x="{x:.1f}" y="{_TOP - 12:.1f}" text-anchor="{anchor}">{tick:,g}</text>'


def _limits(rows: Sequence[Document], panel: Panel, bottom: float) -> Iterator[str]:
    for limit in sorted({row["wire_limit_ms"] for row in rows if row["wire_limit_ms"] is not None}):
        x = panel.left + panel.length(limit)
        yield (
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6:.1f}" y2="{bottom:.1f}">'
            f"<title>the wire's limit, {milliseconds(limit)} ms</title></line>"
        )
