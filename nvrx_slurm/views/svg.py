"""The pictures of a report as SVG text. Pure. Colours are classes of report.css.

Text from elsewhere comes through `safe`, which is the only way into the page.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from nvrx_slurm.core.account.account import SECTION
from nvrx_slurm.core.logs.printable import printable
from nvrx_slurm.core.words import in_words
from nvrx_slurm.views.timeline import (
    ACTIVE,
    AGAIN,
    DOWN,
    Incident,
    NodeRow,
    ReportFacts,
    StepTime,
    Stretch,
)

WIDTH = 960
# Colour -> its value for pixels, what it stands for, and its buckets. report.css has them, too, light and dark. Most
# are of Okabe and Ito: each two differ for those, too, who do not see red, green or blue.
COLOURS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "train": ("007a5a", "trains", ("productive",)),
    "save": ("56b4e9", "saves, evaluates, other sections", ("checkpoint",)),
    "lost": ("e69f00", "work that was lost", ("recomputed",)),
    "detect": ("b5330f", "fault not noticed yet", ("detect",)),
    "down": ("3f4756", "stops, plans", DOWN),
    "again": ("f3e36b", "starts", AGAIN),
    "wait": ("a34d9d", "waits for nodes", ("wait_nodes",)),
    "spare": ("d3d9df", "spare", ("spare_idle",)),
    "away": ("111418", "lost", ("lost",)),
    "gone": ("", "excluded", ("excluded",)),
    "other": ("949aa1", "suspended, or not known", ("suspended", "other")),
}
# where pixels differ then
_DARK = {
    "train": "1a9a76",
    "down": "aab4c4",
    "spare": "2e353d",
    "away": "f2f4f6",
    "other": "626a73",
}
_CODES = {colour: number for number, colour in enumerate(COLOURS)}
_OF_BUCKET = {bucket: colour for colour, (_, _, buckets) in COLOURS.items() for bucket in buckets}
# of a band: units above it, for host names, of a row; pixels from left to right
_TOP = 26
_LABEL, _ROW, _COLUMNS = 150, 20, 1620
_NAME_CHARS, _MOST_RECTANGLES, _MOST_ROWS, _PIXEL_ROWS = 17, 4000, 64, 480
_TICKS = (
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)


def safe(text: object, most: int = 300) -> str:
    """At most `most` characters of any text, for the page: no character of it is markup or acts on the text around."""
    told = printable(str(text)[: most + 1])
    return html.escape(told if len(told) <= most else told[: most - 1] + "…")


def colour_of(bucket: str) -> str:
    """A key of COLOURS."""
    return "save" if bucket.startswith(SECTION) else _OF_BUCKET.get(bucket, "other")


def picture(height: float, title: str, parts: Sequence[str]) -> str:
    """An SVG of that height (units; it is WIDTH wide). `title`: what it shows, for those who do not see it."""
    box = f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{safe(title)}"'
    return f'<div class="scroll"><svg {box}>{"".join(parts)}</svg></div>'


def text(x: float, y: float, content: object, more: str = "", most: int = 120) -> str:
    """A line of text; `more`: attributes."""
    return f'<text x="{x:.4g}" y="{y:.4g}"{more}>{safe(content, most)}</text>'


def _rect(x: float, y: float, wide: float, high: float, colour: str, title: str = "") -> str:
    inside = f"><title>{safe(title)}</title></rect>" if title else "/>"
    return f'<rect class="{colour}" x="{x:.5g}" y="{y:.5g}" width="{wide:.4g}" height="{high:.4g}"{inside}'


# --- the band of the job ----------------------------------------------------------------------------------------------


def band(job: ReportFacts) -> str:
    """Nodes from top to bottom, time from left to right. Incidents are numbered above, and have a ring in their row."""
    scale = (WIDTH - _LABEL) / max(job.wall_s, 1e-9)
    rows = job.rows or (NodeRow((("all nodes", ""),), ((0.0, ACTIVE),)),)
    template = _columns(job.stretches, job.wall_s)
    pixels = [_row(row, template, job.wall_s) for row in rows]
    runs = [list(_runs(row)) for row in pixels[: _MOST_ROWS + 1]]
    parts = list(_marks(job, scale))
    if len(rows) > _MOST_ROWS or sum(map(len, runs)) > _MOST_RECTANGLES:
        tall = max(_ROW, min(_PIXEL_ROWS, 3 * len(rows)))
        parts += _as_image(rows, pixels, tall)
    else:
        tall = _ROW * len(rows)
        parts += _as_rectangles(rows, runs)
        parts += _rings(job, rows, _TOP, scale)
    parts += _axis(job.wall_s, _TOP + tall, scale)
    told = f"{len(job.nodes)} nodes over {in_words(job.wall_s)}, {len(job.incidents)} incidents"
    return picture(_TOP + tall + 24, told, parts)


def _as_image(rows: Sequence[NodeRow], pixels: list[bytes], tall: int) -> Iterator[str]:
    """Many rows: one pixel per row and time, a picture for each theme."""
    place = f'x="{_LABEL}" y="{_TOP:g}" width="{WIDTH - _LABEL}" height="{tall}"'
    for theme, other in (("light", {}), ("dark", _DARK)):
        data = base64.b64encode(png(pixels, other)).decode()
        href = f"data:image/png;base64,{data}"
        yield f'<image class="{theme}" {place} preserveAspectRatio="none" href="{href}"/>'
    yield text(_LABEL - 10, _TOP + 14, f"{len(rows)} rows, first:", ' class="label"')
    yield text(_LABEL - 10, _TOP + 30, _name(rows[0]), ' class="label"')


def _as_rectangles(
    rows: Sequence[NodeRow], runs: Sequence[Sequence[tuple[int, int, str]]]
) -> Iterator[str]:
    """A rectangle for each time in one colour. A lost node is a thin line."""
    unit = (WIDTH - _LABEL) / _COLUMNS
    for number, row in enumerate(rows):
        y = _TOP + _ROW * number
        yield text(_LABEL - 10, y + 14, _name(row), ' class="label"')
        for begin, end, colour in runs[number]:
            margin = 9 if colour == "away" else 2
            wide = (end - begin) * unit
            yield _rect(
                _LABEL + begin * unit,
                y + margin,
                wide,
                _ROW - 2 * margin,
                colour,
            )


def _name(row: NodeRow) -> str:
    """What stands before a row; the middle of a long name is left out."""
    name = row.nodes[0][0] if len(row.nodes) == 1 else f"{len(row.nodes)} nodes"
    half = _NAME_CHARS // 2
    return name if len(name) <= _NAME_CHARS else f"{name[: half - 1]}…{name[half - _NAME_CHARS :]}"


def _columns(found: Sequence[Stretch], wall_s: float) -> bytes:
    """The colour of the longest stretch in each column of pixels."""
    colours = bytearray([_CODES["other"]]) * _COLUMNS
    longest = [0.0] * _COLUMNS
    per_s = _COLUMNS / max(wall_s, 1e-9)
    for one in found:
        begin = one.begin_s * per_s
        end = (one.begin_s + one.took_s) * per_s
        code = _CODES[colour_of(one.bucket)]
        for column in range(max(0, int(begin)), min(_COLUMNS, int(end) + 1)):
            share = min(end, column + 1.0) - max(begin, column)
            if share > longest[column]:
                longest[column], colours[column] = share, code
    return bytes(colours)


def _row(row: NodeRow, template: bytes, wall_s: float) -> bytes:
    pixels = bytearray(template)
    per_s = _COLUMNS / max(wall_s, 1e-9)
    times = [at_s for at_s, _ in row.roles] + [wall_s]
    places = [min(_COLUMNS, max(0, round(at_s * per_s))) for at_s in times]
    for number, (_, role) in enumerate(row.roles):
        if role != ACTIVE:
            begin = places[number]
            end = places[number + 1]
            pixels[begin:end] = bytes([_CODES[colour_of(role)]]) * (end - begin)
    return bytes(pixels)


def _runs(pixels: bytes) -> Iterator[tuple[int, int, str]]:
    """Begin, end and colour of neighbours of one colour."""
    names = list(COLOURS)
    begin = 0
    for code, some in groupby(pixels):
        end = begin + len(list(some))
        yield begin, end, names[code]
        begin = end


def _marks(job: ReportFacts, scale: float) -> Iterator[str]:
    """A number above the band for each incident; only a line where the last number is near."""
    free = 0.0
    for one in job.incidents:
        x = _LABEL + one.at_s * scale
        half = 4.5 * len(str(one.number))
        yield f'<path class="mark" d="M{x:.5g} 20v6"/>'
        if x - half > free:
            free = x + half + 4
            number = text(x, 15, one.number, ' class="number"')
            yield f'<a href="#i{one.number}">{number}</a>'


def _rings(job: ReportFacts, rows: Sequence[NodeRow], top: float, scale: float) -> Iterator[str]:
    """A ring for each incident, in the row of the node that it began on."""
    where = {}  # by key, of nodes with a row of their own
    for number, row in enumerate(rows):
        if len(row.nodes) == 1:
            _, key = row.nodes[0]
            where[key] = top + (number + 0.5) * _ROW
    for one in job.incidents:
        if one.key in where:
            x = _LABEL + one.at_s * scale
            yield f'<circle class="dot" cx="{x:.5g}" cy="{where[one.key]:g}" r="4"/>'


def _axis(wall_s: float, y: float, scale: float) -> Iterator[str]:
    """Times below a picture, at most 9."""
    step = next((tick for tick in _TICKS if wall_s / tick <= 8), 0) or 86400 * -(
        -wall_s // (8 * 86400)
    )
    yield f'<path class="axis" d="M{_LABEL} {y + 2:g}H{WIDTH}"/>'
    for number in range(int(wall_s / step) + 1):
        x = _LABEL + number * step * scale
        days = number * step / 86400
        told = (
            "0"
            if not number
            else f"{days:g} d"
            if step >= 43200
            else in_words(number * step).replace(".0 s", " s")
        )
        if x < WIDTH - 24:
            yield f'<path class="axis" d="M{x:.5g} {y + 2:g}v4"/>'
            yield text(x, y + 18, told, ' class="tick"')


def png(rows: Sequence[bytes], other: Mapping[str, str]) -> bytes:
    """Rows of colour codes as a PNG image with a palette; the colour without a value is transparent. `other`: values
    that are not as in COLOURS."""
    palette = b"".join(
        bytes.fromhex(other.get(name, value) or "000000") for name, (value, _, _) in COLOURS.items()
    )
    clear = bytes(255 if value else 0 for value, _, _ in COLOURS.values())
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = (
        (b"IHDR", head),
        (b"PLTE", palette),
        (b"tRNS", clear),
        (b"IDAT", data),
        (b"IEND", b""),
    )
    parts = [b"\x89PNG\r\n\x1a\n"]
    for name, body in chunks:
        parts += [struct.pack(">I", len(body)), name, body]
        parts.append(struct.pack(">I", zlib.crc32(name + body)))
    return b"".join(parts)


# --- others -----------------------------------------------------------------------------------------------------------


def waterfall(one: Incident) -> str:
    """The phases of an incident, one below the other, on one axis of time; the line is where it was noticed."""
    begin_s = one.phases[0].begin_s
    end_s = one.phases[-1].begin_s + one.phases[-1].took_s
    scale = (WIDTH - _LABEL - 90) / max(end_s - begin_s, 1e-9)
    parts = list[str]()
    high = _ROW * len(one.phases)
    if begin_s <= one.at_s <= end_s:
        parts.append(
            f'<path class="noticed" d="M{_LABEL + (one.at_s - begin_s) * scale:.5g} 0v{high + 2}"/>'
        )
    for number, phase in enumerate(one.phases):
        x = _LABEL + (phase.begin_s - begin_s) * scale
        y = number * _ROW
        wide = max(2.0, phase.took_s * scale)
        parts.append(
            text(_LABEL - 10, y + 15, PHASES.get(phase.bucket, phase.bucket), ' class="label"')
        )
        parts.append(_rect(x, y + 4, wide, _ROW - 7, colour_of(phase.bucket)))
        parts.append(text(x + wide + 6, y + 15, in_words(phase.took_s), ' class="value"'))
    return picture(high + 4, f"phases of incident {one.number}", parts)


PHASES = {
    "recomputed": "work lost",
    "detect": "not noticed yet",
    "wait_nodes": "wait for nodes",
}


def bar(seconds: Mapping[str, float]) -> str:
    """Node-seconds as one bar."""
    total = sum(seconds.values()) or 1.0
    x = 0.0
    parts = list[str]()
    for bucket, took_s in sorted(
        seconds.items(), key=lambda one: list(COLOURS).index(colour_of(one[0]))
    ):
        wide = WIDTH * took_s / total
        parts.append(
            _rect(x, 0, max(0.5, wide - 1), 34, colour_of(bucket), f"{bucket}: {in_words(took_s)}")
        )
        told = f"{bucket.removeprefix(SECTION)[:14]} {100 * took_s / total:.0f} %"
        if wide > 7 * len(told):
            parts.append(text(x + 8, 22, told, f' class="inside {colour_of(bucket)}-text"'))
        x += wide
    return picture(34, "share of each bucket in the time of all nodes", parts)


def steps(found: Sequence[StepTime], wall_s: float) -> str:
    """The iteration over time: a line for each cycle, from its checkpoint to where it has failed or ended."""
    scale = (WIDTH - _LABEL) / max(wall_s, 1e-9)
    high = 160
    most = max(one.first + one.steps for one in found)

    def place(at_s: float, iteration: float) -> str:
        return f"{_LABEL + at_s * scale:.5g} {8 + high * (1 - iteration / most):.4g}"

    parts = []
    for iteration in (0, most // 2, most):
        where = place(0.0, iteration)
        parts.append(f'<path class="grid" d="M{where}H{WIDTH}"/>')
        parts.append(text(_LABEL - 10, float(where.split()[1]) + 4, iteration, ' class="label"'))
    before = ""
    for one in found:
        begin = place(one.begin_s, one.first)
        end = place(one.end_s, one.first + one.steps)
        if before:
            parts.append(f'<path class="noticed" d="M{before}L{begin}"/>')
        parts.append(f'<path class="line" d="M{begin}L{end}"/>')
        before = end
    return picture(high + 34, "the iteration over time", [*parts, *_axis(wall_s, high + 8, scale)])
