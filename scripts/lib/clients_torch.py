"""Programs as users have them: data loaders, trackers, compilers. All end as under torchrun, bit by bit, also after a
rank was killed, and leave nothing in /dev/shm."""

from clients import TORCHRUN, Case, kill

_FLAGS = ("--nproc-per-node=2", "--max-restarts=3")
_FSDP = {  # what `accelerate launch --use_fsdp --fsdp_version=2 --cpu` exports
    "ACCELERATE_USE_CPU": "true",
    "NVRX_DISABLE_RANK_MONITORS": "true",  # for torchrun
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}
_WAYS = {
    "plain": (),
    "gpt": (),
    "fork": (),
    "spawn": (),
    "forkserver": (),
    "dcp": (),
    "compile": (),
    "loky": ("joblib",),
    "datasets": ("datasets",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "comet": ("comet_ml",),
    "streaming": ("mosaicml-streaming",),
}


def _cases(name, packages, *program, after=r"\bstep 15$", env=None):
    words = (*_FLAGS, *program)
    env = env or {}
    under_torchrun = Case(f"{name}-torchrun", packages, words, launcher=TORCHRUN, restarts=-1, env=env)
    same_as = under_torchrun.name
    return [
        under_torchrun,
        Case(f"{name}-plain", packages, words, same_as=same_as, env=env),
        Case(f"{name}-kill", packages, words, (kill(1, after),), same_as=same_as, env=env),
    ]


CASES = [
    *(
        case
        for way, packages in _WAYS.items()
        for case in _cases(f"way-{way}", packages, "{programs}/torch_ways.py", way, "{dir}")
    ),
    *_cases("hydra", ("hydra-core",), "{programs}/hydra_entry.py", "+directory={dir}", "hydra.run.dir={dir}/hydra"),
    *_cases("trl", ("trl", "transformers", "accelerate"), "{programs}/trl_sft.py", "{dir}", after=r"'loss'"),
    *_cases(
        "fsdp", ("transformers", "accelerate"), "{programs}/hf_accelerate.py", "{dir}/checkpoint", env=_FSDP
    ),
    Case(
        "accelerate-test", ("transformers", "accelerate"),
        (*_FLAGS, "{site}/accelerate/test_utils/scripts/test_script.py"), env={"ACCELERATE_USE_CPU": "true"},
    ),
]  # fmt: skip
