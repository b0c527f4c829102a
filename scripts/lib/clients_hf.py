"""Hugging Face (Trainer, accelerate loop): final weights equal those of the undisturbed run. Lightning: the fit ends.

Lightning resumes in the middle of an epoch without the place of the loader, so its weights differ after a restart.
"""

from clients import Case, hang, kill

_FLAGS = ("--nproc-per-node=2", "--max-restarts=5")
_LIMITS = ("--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=4")


def _cases(name, packages, *program):
    def case(what, faults=(), **more):
        same_as = f"{name}-plain" if name != "lightning" and faults else ""
        words = (*_FLAGS, *_LIMITS, *program, *more.pop("words", ()))
        return Case(f"{name}-{what}", packages, words, faults, same_as=same_as, **more)

    found = [
        case("plain"),
        case("kill", (kill(1, r"\bstep 15$"),)),
        case("hang", (hang(1, r"\bstep 25$"),)),
        case("two-kills", (kill(0, r"\bstep 15$"), kill(1, r"\bstep 35$"))),
    ]
    if name == "lightning":
        says = ("ArithmeticError", r"final step 60\b")
        found.append(case("exception", words=("--raises=25",), restarts=1, says=says))
    return found


CASES = [
    *_cases("trainer", ("transformers", "accelerate"), "{programs}/hf_trainer.py", "{dir}/out"),
    *_cases("accelerate", ("transformers", "accelerate"), "{programs}/hf_accelerate.py", "{dir}/checkpoint"),
    *_cases("lightning", ("lightning",), "{programs}/lightning_fit.py", "{dir}"),
]
