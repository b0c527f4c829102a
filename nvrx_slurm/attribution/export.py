"""Posts results as JSON, with the names that dashboards of NVRx know."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from nvrx_slurm.attribution.answer import Answer
from nvrx_slurm.attribution.settings import CycleNews, Settings
from nvrx_slurm.attribution.web import Trouble, Web

_log = logging.getLogger(__name__)
_TRY_S, _TRIES, _PAUSE_S = 10.0, 3, 0.5
_AGAIN = (408, 425, 429)
_MAX_RESULT_CHARS = 64 << 10


def record(settings: Settings, news: CycleNews, answer: Answer, took_s: float, now_ms: int) -> dict[str, Any]:
    """One result. `now_ms`: Unix milliseconds. Prefixes tell types: s text, l whole number, d number, ts time."""
    primary = answer.result.get("primary_failure", {})
    hung = [news.fault["rank"]] if news.fault.get("kind") == "hang" else []
    return {
        "s_cluster": settings.cluster,
        "s_user": settings.user or "unknown",
        "s_job_id": settings.job_id,
        "l_cycle_id": news.cycle,
        "s_log_path": news.log,
        "s_recommendation_action": answer.action,
        "s_recommendation_source": answer.source,
        "s_auto_resume": "STOP" if answer.action == "STOP" else "RESTART",
        "s_auto_resume_explanation": answer.reason,
        "s_primary_issues": json.dumps([primary.get("line") or primary.get("failure_class", "unknown")]),
        "s_attribution_result_json": json.dumps(answer.result)[:_MAX_RESULT_CHARS],
        "s_fr_dump_path": "",
        "s_fr_analysis": "",
        "s_hanging_ranks": ",".join(map(str, hung)),
        "l_hanging_ranks": hung,
        "d_attribution_analysis_duration_seconds": round(took_s, 3),
        "ts_attribution_analysis_completed_ms": now_ms,
    }


async def export(web: Web, content: dict[str, Any]) -> None:
    """Post it, at most three times."""
    why = ""
    for number in range(_TRIES):
        if number:
            await asyncio.sleep(_PAUSE_S * 2 ** (number - 1))
        try:
            reply = await web.ask("POST", "", _TRY_S, content=content)
        except Trouble as trouble:
            why = str(trouble)
            continue
        if reply.status < 300:
            return
        why = f"status {reply.status}"
        if reply.status < 500 and reply.status not in _AGAIN:
            break
    _log.warning("a result was not exported: %s", why)
