"""The picture of a replay, as SVG written by hand: when which interruption came, and what the losses were."""

from replay_llama3 import DAY_S, buckets

_WIDTH, _LEFT, _RIGHT = 920, 190, 120
_COLOURS = {
    "device": "#c0392b", "device_hang": "#8e44ad", "hang": "#8e44ad", "error": "#d68910", "node": "#1f618d",
    "corruption": "#17202a", "maintenance": "#7f8c8d",
}  # fmt: skip
_SEEN = {
    "device": "device error", "device_hang": "hang", "error": "exception", "node": "node silent",
    "corruption": "silent corruption", "maintenance": "planned",
}  # fmt: skip
_JOBS = ("#2e86c1", "#a9cce3")


def picture(found):
    """One file without script or reference. `found`: each job with its seeds, at least one."""
    names = [name for name, _ in buckets(found[0][1]) if name != "productive"]
    longest = max(high for job, outcomes in found for name, (_, _, high) in buckets(outcomes) if name in names)
    strips, bars = 42 * len(found), 16 * len(found) + 8
    height = 62 + strips + 44 + bars * len(names)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Interruptions in time, and time lost by bucket">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *_legend(),
        *(line for i, one in enumerate(found) for line in _strip(58 + 42 * i, *one)),
        _text(8, 58 + strips + 14, "share of a training node's wall time; mean, and 95 % of the seeds", bold=True),
    ]
    for row, name in enumerate(names):
        y = 58 + strips + 26 + bars * row
        lines.append(_text(_LEFT - 8, y + bars / 2, name, "end"))
        for i, (job, outcomes) in enumerate(found):
            mean, low, high = dict(buckets(outcomes)).get(name, (0.0, 0.0, 0.0))
            lines += _bar(y + 16 * i, mean / longest, low / longest, high / longest, _JOBS[i % 2])
            lines.append(_text(_LEFT + 8 + _scale(high / longest), y + 16 * i + 11, f"{mean:.3f} % ({job.nodes:,})"))
    return "\n".join([*lines, "</svg>", ""])


def _scale(share):
    return share * (_WIDTH - _LEFT - _RIGHT)


def _text(x, y, text, anchor="start", bold=False):
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{text}</text>'


def _legend():
    yield _text(8, 18, "interruptions of the first seed", bold=True)
    for i, (kind, what) in enumerate(_SEEN.items()):
        x = _LEFT + 118 * i
        yield f'<rect x="{x}" y="28" width="10" height="10" fill="{_COLOURS[kind]}"/>{_text(x + 14, 38, what)}'


def _strip(y, job, outcomes):
    yield _text(8, y + 14, f"{job.nodes:,} nodes,")
    yield _text(8, y + 28, f"{job.wall_s / DAY_S:.4g} days")
    yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 10}" height="30" fill="#eafaf1"/>'
    for at_s, kind in outcomes[0].marks:
        x = _LEFT + at_s / job.wall_s * (_WIDTH - _LEFT - 10)
        yield f'<path d="M{x:.1f} {y}v30" stroke="{_COLOURS[kind]}" stroke-width="0.7"/>'


def _bar(y, mean, low, high, colour):
    yield f'<rect x="{_LEFT}" y="{y}" width="{_scale(mean):.1f}" height="13" fill="{colour}"/>'
    yield f'<path d="M{_LEFT + _scale(low):.1f} {y + 6.5}H{_LEFT + _scale(high):.1f}" stroke="#17202a"/>'
