"""Cases of `scripts/dev/clients`: the files of Megatron-LM and Megatron-Bridge that import NVRx, unchanged."""

from __future__ import annotations

from typing import Any

from clients import Case

# Of their wheels, which are for Python 3.12, only these files run, and they are Python.
_PACKAGES = {"lm": "megatron-core==0.19.2", "bridge": "megatron-bridge==0.6.2"}
_WHEEL = (
    "--ignore-requires-python",
    "--python-version=3.12",
    "--platform=manylinux_2_28_x86_64",
    "--only-binary=:all:",
    "--target={site}",
)
_FLAGS = ("--nvrx-compat", "--nproc-per-node=2", "--max-restarts=3")
_SECTIONS = ("--ft-rank-section-timeouts=setup:60,step:5,checkpointing:20", "--ft-rank-out-of-section-timeout=30")
_PROGRAM = "{programs}/megatron_files.py"


def _cases(who: str) -> list[Case]:
    def case(name: str, *argv: str, **more: Any) -> Case:
        words = (*_FLAGS, *argv[:-2], _PROGRAM, who, argv[-2], "{site}", "{dir}/checkpoints", argv[-1])
        return Case(f"megatron-{who}-{name}", (_PACKAGES[who], *_WHEEL), words, with_deps=False, **more)

    sections, inside = f"megatron-{who}-sections", f"megatron-{who}-inprocess"
    own: dict[str, Any] = {"restarts": 1, "same_as": sections}
    return [
        case("sections", *_SECTIONS, "monitored", "--fault=", says=(r"FT: updated timeouts saved to",)),
        case("killed", *_SECTIONS, "monitored", "--fault=rank_killed", says=(r"FT: loaded timeouts",), **own),
        case("hung", *_SECTIONS, "monitored", "--fault=rank_hung", says=(r"Simulating fault: rank_hung",), **own),
        case("inprocess", "--restart-policy=min-healthy", "inprocess", "--fault="),
        case(
            "inprocess-raises", "--restart-policy=min-healthy", "inprocess", "--fault=as asked",
            says=(r"iteration 1 rank 1",), same_as=inside,
        ),
    ]  # fmt: skip


CASES = [*_cases("lm"), *_cases("bridge")]
