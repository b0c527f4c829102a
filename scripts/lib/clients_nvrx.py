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


# The only wheels of 0.6 are for Python 3.12 and a later glibc; what runs here of them is Python.
_WHEEL = ("--python-version=3.12", "--platform=manylinux_2_39_x86_64", "--only-binary=:all:", "--target={site}")
_ASYNC = (
    "--ft-initial-rank-heartbeat-timeout=120", "--ft-rank-heartbeat-timeout=120", "--max-restarts=25",
    "--ft-crash-loop-backoff=0", "{programs}/nvrx_async.py", "{dir}/checkpoints", "300",
)  # fmt: skip
_TWENTY = (kill(0, r"rank 1 writes"), kill(1, r"rank 0 saved")) * 10


def _case(name, argv, **more):
    packages = more.pop("packages", _PACKAGES)
    return Case(f"nvrx-{name}", packages, (*_FLAGS, *argv), with_deps=False, **more)


def _async_cases(version, *how):
    """NVRx's own writers under --nvrx-compat: alone, and with twenty kills, every other one while they write."""
    packages = (f"nvidia-resiliency-ext=={version}", *how)
    more: dict[str, Any] = {"packages": packages, "needs": ("psutil",), "timeout_s": 1500.0}
    name = f"async-{version}"
    return [
        _case(name, _ASYNC, **more),
        _case(f"{name}-killed", _ASYNC, faults=_TWENTY, same_as=f"nvrx-{name}", **more),
    ]


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
    *_async_cases("0.4.1"),
    *_async_cases("0.6.0", *_WHEEL),
]  # fmt: skip
