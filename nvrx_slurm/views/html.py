"""A report as one HTML page without scripts and without references to anything outside. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from nvrx_slurm.core.account.account import BUCKETS
from nvrx_slurm.core.words import in_words
from nvrx_slurm.views import svg
from nvrx_slurm.views.svg import COLOURS, colour_of, safe
from nvrx_slurm.views.timeline import ACTIVE, LOST, Incident, ReportFacts

# incidents: of more, the rest is in the table only; of more, all are closed
IN_FULL, _OPEN = 200, 8
_LOST = "the node was lost: it may have left the allocation"
_UNIT, _TOGETHER = (
    re.compile(r"(?<=\d) (?=\w|%)|(?<= lost) (?=node)|(?<= used) (?=spare)"),
    "\u00a0",
)


def page(job: ReportFacts, css: str) -> str:
    """The whole page. `css`: its style sheet."""
    command = f'<p class="command">{safe(job.command, 500)}</p>' if job.command else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe(job.title)}</title>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{css}</style></head><body><main>'
        f'<p class="over">{safe(job.title)} · began {_clock(job.began_s)}</p>'
        f"{command}<h1>{_UNIT.sub(_TOGETHER, safe(job.sentence, 600))}</h1>"
        f'<dl class="tiles">{"".join(_tiles(job))}</dl>'
        f"{''.join(_advice(job))}{''.join(_band(job))}{''.join(_time(job))}{''.join(_incidents(job))}{''.join(_steps(job))}"
        f"{''.join(_again(job))}<footer>{safe(job.source, 500)}. Clocks are UTC; +times count from the "
        "beginning of the job.</footer></main></body></html>\n"
    )


def _advice(job: ReportFacts) -> Iterator[str]:
    told = [f"<li>{safe(line, 400)}</li>" for line in job.summary["advice"]]
    if told:
        yield f'<h2>What would cost less</h2><ul class="advice">{"".join(told)}</ul>'


def _tiles(job: ReportFacts) -> Iterator[str]:
    ratios, steps = (
        (job.summary[name] for name in ("productive_share_of_training_nodes", "productive_share")),
        job.summary["lost_steps"],
    )
    told: list[object] = [
        f"{100 * ratio:.1f} %" if ratio is not None else "not known" for ratio in ratios
    ]
    lost = in_words(job.summary["lost_s"]) + (f", {steps} steps" if steps is not None else "")
    nodes = sum(len(row.nodes) for row in job.rows) or len(job.nodes)
    told += [job.summary["restarts"], lost, in_words(job.wall_s), nodes]
    shares = "productive, training nodes", "productive, incl. spares"
    names = (*shares, "restarts", "lost by them", "lasted", "nodes")
    yield from (
        f"<div><dt>{name}</dt><dd>{safe(value)}</dd></div>"
        for name, value in zip(names, told, strict=True)
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: int = 0) -> str:
    """`heads`: of columns, the last `numbers` of which are numbers. A cell that is a Markup stays as it is."""
    kinds = [' class="n"' * (place >= len(heads) - numbers) for place in range(len(heads))]
    head = "".join(
        f'<th scope="col"{kind}>{safe(name)}</th>' for kind, name in zip(kinds, heads, strict=True)
    )
    cells = (zip(kinds, map(_text, row), strict=True) for row in rows)
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in row)}</tr>" for row in cells
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(content: object) -> str:
    return content if isinstance(content, Markup) else safe(content, 500)


class Markup(str):
    """Text that is markup already."""


def _folded(name: str, content: str) -> str:
    return f'<details class="table"><summary>{safe(name)}</summary>{content}</details>'


def _plus(seconds: float) -> str:
    return f"+{in_words(max(0.0, seconds))}"


# --- sections ---------------------------------------------------------------------------------------------------------


def _band(job: ReportFacts) -> Iterator[str]:
    yield "<h2>The job</h2><p>Each row is a node; time runs to the right. A number is an incident, a ring its node.</p>"
    took: dict[str, float] = defaultdict(float)
    for one in job.stretches:
        took[colour_of(one.bucket)] += one.took_s
    used = {name for name, took_s in took.items() if took_s > job.wall_s / 2000}
    used |= {colour_of(role) for row in job.rows for _, role in row.roles[1:] if role != ACTIVE}
    legend = [
        f'<li><i class="{name}"></i>{words}</li>'
        for name, (_, words, _) in COLOURS.items()
        if name in used
    ]
    yield f'<ul class="legend">{"".join(legend)}</ul>{svg.band(job)}'
    groups = [name for name in COLOURS if any(_of(node, name) for node in job.nodes)]
    heads = ["node", *(COLOURS[name][1] for name in groups)]
    rows = ([node["host"], *(_of(node, name) for name in groups)] for node in job.nodes)
    yield _folded("Table of the nodes", _table(heads, rows, len(groups)))


def _of(node: Mapping[str, Any], colour: str) -> str:
    """The time of a node in the buckets of a colour; "" = none."""
    found = sum(took_s for bucket, took_s in node["seconds"].items() if colour_of(bucket) == colour)
    return in_words(found) if found else ""


def _time(job: ReportFacts) -> Iterator[str]:
    seconds, total = job.summary["node_seconds"], sum(job.summary["node_seconds"].values()) or 1.0
    yield (
        "<h2>Where the time went</h2><p>All nodes, as Slurm bills them. Of training nodes' time, that of spares and of"
        " nodes that were lost or excluded is left out.</p>"
    )
    yield svg.bar(seconds)
    rows = []
    for bucket in sorted(seconds, key=[*BUCKETS, *seconds].index):  # they say "from there"
        took_s = seconds[bucket]
        name = Markup(f'<i class="{colour_of(bucket)}"></i>{safe(bucket)}')
        what, grade = (
            _LOST if bucket == LOST else BUCKETS.get(bucket, ("", "sections of that name"))[1],
            job.summary["grades"].get(bucket, ""),
        )
        rows.append([name, what, in_words(took_s), f"{100 * took_s / total:.1f} %", grade])
    yield _table(["bucket", "what it counts", "of all nodes", "share", "known"], rows, 3)


def _incidents(job: ReportFacts) -> Iterator[str]:
    if not job.incidents:
        return
    yield f"<h2>{len(job.incidents)} incident{'s' * (len(job.incidents) > 1)}</h2>"
    yield "<p>A cost is the time from the last sign of life until the job trained again, and repeated work.</p>"
    if len(job.incidents) > _OPEN:
        rows = []
        for one in job.incidents:
            brief = one.number <= len(job.incidents) - IN_FULL  # its number is linked to this row
            name = Markup(f'<a id="i{one.number}">{one.number}</a>' if brief else _links([one]))
            rows.append([name, _plus(one.at_s), one.host, one.cause, in_words(one.lost_s)])
        yield _folded(
            f"Table of all {len(rows)}",
            _table(["", "when", "node", "first cause", "lost"], rows, 1),
        )
    yield from (
        _incident(one, job.began_s, len(job.incidents) <= _OPEN) for one in job.incidents[-IN_FULL:]
    )


def _links(found: Sequence[Incident]) -> str:
    return ", ".join(f'<a href="#i{one.number}">{one.number}</a>' for one in found)


def _incident(one: Incident, began_s: float, is_open: bool) -> str:
    clock, cost = (
        _clock(began_s + one.at_s),
        "ended the job" if one.ends else f"{in_words(one.lost_s)} lost",
    )
    evidence, said = (
        "\n".join(safe(line, 400) for line in one.lines),
        [(_plus(at_s), line) for at_s, line in one.said],
    )
    facts = {
        "time": f"{clock}, cycle {one.cycle}",
        "where": f"rank {one.rank} on {one.host}" if one.rank >= 0 else one.host,
        "to blame": ", ".join(filter(None, (one.blame, one.rule and f"rule {one.rule}"))),
        "steps repeated": "" if one.lost_steps is None else one.lost_steps,
        "ranks of the next cycle": one.again,
        "resumed": one.resumed,
        "advice": one.advice,
        "log": one.log,
        "who waited": Markup(_table(["ranks", "where"], one.waits)) if one.waits else "",
        "evidence": Markup(f"<pre>{evidence}</pre>") if evidence else "",
        "decided": Markup(_table(["when", "what"], said)) if said else "",
    }
    rows = "".join(
        f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in facts.items() if value != ""
    )
    phases = ""
    if one.phases:
        cells = [
            [svg.PHASES.get(p.bucket, p.bucket), _plus(p.begin_s), in_words(p.took_s)]
            for p in one.phases
        ]
        table = _folded("Table of the phases", _table(["phase", "from", "took"], cells, 2))
        phases = svg.waterfall(one) + table
    return (
        f'<details class="incident" id="i{one.number}"{" open" * is_open}><summary><b>{one.number}</b>'
        f'<span class="when" title="{clock}">{_plus(one.at_s)}</span><span class="what">{safe(one.cause, 400)}</span>'
        f'<span class="cost">{cost}</span></summary><div class="in">{phases}<dl>{rows}</dl></div></details>'
    )


def _steps(job: ReportFacts) -> Iterator[str]:
    if job.paces:
        yield "<h2>Steps</h2><p>Each cycle begins at its checkpoint, and ends at its last step or checkpoint.</p>"
        yield svg.steps(job.paces, job.wall_s)
        rows = [
            [_plus(one.begin_s), _plus(one.end_s), one.first, one.steps, f"{one.step_s:.4g} s"]
            for one in job.paces
        ]
        heads = ["from", "to", "first", "steps", "each"]
        yield _folded("Table of the steps", _table(heads, rows, 3))


def _again(job: ReportFacts) -> Iterator[str]:
    """Nodes that came up more than once."""
    rows = []
    for one in (
        one for one in job.summary["by_node"] if one["restarts"] > 1 and one["host"] != "unknown"
    ):
        found = Markup(
            _links([incident for incident in job.incidents if incident.host == one["host"]])
        )
        rows.append([one["host"], found, one["restarts"], in_words(one["lost_s"])])
    if rows:
        yield "<h2>Nodes that came up more than once</h2><p>As the first cause of an incident.</p>"
        yield _table(["node", "incidents", "how often", "lost"], rows, 2)


def _clock(at_s: float) -> str:
    """Unix seconds as UTC."""
    try:
        return datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""
