"""Small pictures made of characters: a line plot in braille dots and a bar in eighths."""

from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille cell, by row from the top, then column."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def resample(values: Sequence[float], count: int) -> list[float]:
    """`values` stretched (linearly) or squeezed (means of neighbours) to `count` points."""
    n = len(values)
    if n == 1:
        return [values[0]] * count
    if n >= count:
        edges = [i * n // count for i in range(count + 1)]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    points = []
    for i in range(count):
        x = i * (n - 1) / (count - 1)
        left = min(int(x), n - 2)
        points.append(values[left] + (x - left) * (values[left + 1] - values[left]))
    return points


def line_plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """`height` lines of `width` characters that draw `values` from their least (bottom) to their greatest (top).

    Each character holds 2 by 4 dots. Fewer than two values, or all equal, give a flat line.
    """
    if not values or width < 1 or height < 1:
        return [" " * max(0, width)] * max(0, height)
    columns, rows = 2 * width, 4 * height
    points = resample(values, columns)
    low, high = min(values), max(values)
    scale = (rows - 1) / (high - low) if high > low else 0.0
    levels = [round((point - low) * scale) for point in points]
    cells = [[0] * width for _ in range(height)]
    previous = levels[0]
    for x, level in enumerate(levels):
        # A steep line is filled in, or it would fall apart into dots.
        start, stop = sorted((level, previous + (level > previous) - (level < previous)))
        for y in range(start, stop + 1):
            row, dot = divmod(rows - 1 - y, 4)
            cells[row][x // 2] |= _DOTS[dot][x % 2]
        previous = level
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def bar(share: float, width: int) -> str:
    """A bar that fills `share` (0 to 1) of `width` characters, padded with spaces."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width)
