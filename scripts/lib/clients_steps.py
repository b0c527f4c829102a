"""Programs that import nothing of ours: their steps are counted, weights are as with `--ft-step-hook=off`, a rank that
is stopped is found by looking, and a pause is left alone."""

from __future__ import annotations

from typing import Any

from clients import Case, hang

_FLAGS = ("--nproc-per-node=2", "--max-restarts=3", "--ft-crash-loop-backoff=0")
_SOON = ("--ft-step-timeout-min=3", "--ft-step-timeout-factor=5")
_HF = ("transformers", "accelerate")
_COUNTED = "{programs}/counted.py"
_TIMEOUT_S = 400.0
_DEEPSPEED = ("deepspeed", "setuptools")


def _cases(name: str, packages: tuple[str, ...], steps: int, *program: str, after: str = r"\bstep 25$") -> list[Case]:
    """`after`: a line upon which a rank is stopped; "": none is."""
    words = (*_FLAGS, _COUNTED, *program)
    more: Any = {"env": {"ALONE": "1"}, "timeout_s": _TIMEOUT_S}
    off, on = f"steps-{name}-off", f"steps-{name}"
    counted = tuple(rf"rank {rank} counted {steps} steps" for rank in (0, 1))
    found = [
        Case(off, packages, ("--ft-step-hook=off", *words), says=("rank 0 counted None steps",), **more),
        Case(on, packages, words, same_as=off, says=counted, **more),
    ]
    if after:
        stopped = (hang(1, after),)
        says = (r"rank 1 .* hung: it is stopped.*has made no step for",)
        found.append(Case(f"{on}-stopped", packages, (*_SOON, *words), stopped, says=says, **more))
    return found


def _pause(kind: str, *packages: str) -> Case:
    says = (r"nothing proves a hang: .*rank 0 (reads or writes|computes) at .*pauses.py", "rank 1 waits at")
    words = (*_FLAGS, *_SOON, "{programs}/pauses.py", kind, "{dir}")
    return Case(f"pause-{kind}", packages, words, says=says, timeout_s=_TIMEOUT_S)


CASES = [
    *_cases("loop", (), 40, "{programs}/torch_ways.py", "plain", "{dir}"),
    *_cases("trainer", _HF, 60, "{programs}/hf_trainer.py", "{dir}/out"),
    *_cases("accelerate", _HF, 60, "{programs}/hf_accelerate.py", "{dir}/checkpoint"),
    *_cases("lightning", ("lightning",), 60, "{programs}/lightning_fit.py", "{dir}"),
    *_cases("trl", ("trl", *_HF), 20, "{programs}/trl_sft.py", "{dir}", after=""),
    *(
        case
        for stage in (0, 1, 2, 3)
        for case in _cases(
            f"deepspeed-{stage}", _DEEPSPEED, 40, "{programs}/deepspeed_zero.py", str(stage), "{dir}",
            after="" if stage in (0, 2) else r"\bstep 25$",
        )
    ),
    _pause("tokenises", "tokenizers"),
    _pause("maps", "datasets"),
    _pause("compiles"),
]  # fmt: skip
