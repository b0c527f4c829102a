"""Cases of `scripts/dev/clients`: programs in the shapes of NVRx's examples, which import nvidia_resiliency_ext."""

from __future__ import annotations

from typing import Any

from clients import PROGRAMS, Case, hang, kill

_PACKAGES = ("nvidia-resiliency-ext==0.4.1",)
_FLAGS = ("--nvrx-compat", "--nproc-per-node=2", "--max-restarts=3", "--ft-workload-check-interval=0.5")
_BEATS = (
    "--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=3",
    "{programs}/nvrx_monitored.py", "--checkpoint={dir}/checkpoint",
)  # fmt: skip
_TWICE = (kill(1, r"step 20\b"), kill(0, r"step 50\b"))
_MODULE = (*_BEATS[:-2], "-m", "nvrx_monitored", "--checkpoint={dir}/checkpoint")
_PATH = {"PYTHONPATH": str(PROGRAMS)}
_SECTIONS = (
    "--ft-rank-section-timeouts=init:60,step:5,checkpoint:20", "--ft-rank-out-of-section-timeout=30",
    "{programs}/nvrx_monitored.py", "--checkpoint={dir}/checkpoint", "--sections",
)  # fmt: skip
_INPROCESS = "{programs}/nvrx_inprocess.py"
_STRAGGLER = "{programs}/nvrx_straggler.py"
_HEALTHY = ("--restart-policy=min-healthy", _INPROCESS)
_ADVANCED = ("--nproc-per-node=4", *_HEALTHY, "advanced")
_AGAIN: dict[str, Any] = {"restarts": 0, "says": (r"iteration 1 rank 1 of 2",)}


def _case(name: str, argv: tuple[str, ...], **more: Any) -> Case:
    return Case(f"nvrx-{name}", _PACKAGES, (*_FLAGS, *argv), with_deps=False, **more)


CASES = [
    _case("heartbeats", _BEATS),
    _case("heartbeats-killed", _BEATS, faults=(kill(1, r"step 30\b"),), same_as="nvrx-heartbeats"),
    _case("heartbeats-hung", _BEATS, faults=(hang(1, r"step 30\b"),), same_as="nvrx-heartbeats"),
    _case("heartbeats-warm", ("--ft-preload=torch", *_BEATS), faults=_TWICE, same_as="nvrx-heartbeats"),
    _case("heartbeats-module", _MODULE, faults=(kill(0, r"step 30\b"),), env=_PATH, same_as="nvrx-heartbeats"),
    _case("sections", _SECTIONS),
    _case("sections-killed", _SECTIONS, faults=(kill(0, r"step 30\b"),), same_as="nvrx-sections"),
    _case("sections-hung", _SECTIONS, faults=(hang(0, r"step 30\b"),), same_as="nvrx-sections"),
    _case("straggler", (_STRAGGLER,), says=(r"step 600: \['SGD.step', 'fwd'\] of 2 ranks, best 1.0",)),
    _case("straggler-killed", (_STRAGGLER,), faults=(kill(1, r"step 60\b"),), same_as="nvrx-straggler"),
    _case("inprocess-basic", (*_HEALTHY, "basic")),
    _case("inprocess-basic-raises", (*_HEALTHY, "basic", "--fault=raise"), **_AGAIN, same_as="nvrx-inprocess-basic"),
    _case("inprocess-any-failed", (_INPROCESS, "basic", "--fault=raise"), **_AGAIN, same_as="nvrx-inprocess-basic"),
    _case(
        "inprocess-advanced-raises", (*_ADVANCED, "--fault=raise"), restarts=0, same_as="nvrx-inprocess-basic",
        says=(r"iteration 0 rank 2 of 3", r"iteration 1 rank 2 of 3"),
    ),
    _case(  # the only node has lost a process: the launcher starts all of them again
        "inprocess-advanced-killed", _ADVANCED, faults=(kill(1, r"step 10\b"),), same_as="nvrx-inprocess-basic",
    ),
    _case(
        "inprocess-nested", (*_HEALTHY, "nested", "--fault=raise"), restarts=0, same_as="nvrx-inprocess-basic",
        says=(*_AGAIN["says"], r"\[NestedRestarter\].*state=handling"),
    ),
]  # fmt: skip
