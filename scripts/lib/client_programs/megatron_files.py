"""Megatron-LM's and Megatron-Bridge's own files that import NVRx, as their packages have them, over stand-ins.

What they import of the rest of both, and CUDA, is stood in for: SITE is where the packages are. `monitored` trains with
sections, saves, loads and learned timeouts, `inprocess` in the wrapper. A fault is their own simulated one, or an
exception, and comes once.
"""

import argparse
import importlib
import os
import sys
import time
import types
from types import SimpleNamespace

import torch
import torch.distributed as dist

STEPS, EVERY = 100, 20


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=["lm", "bridge"])
    parser.add_argument("how", choices=["monitored", "inprocess"])
    parser.add_argument("site")
    parser.add_argument("folder")
    parser.add_argument("--fault", default="")
    return parser.parse_args()


def rank():
    return int(os.environ["RANK"])


def print_rank_0(text):
    if rank() == 0:
        print(text, flush=True)


def stand_in(site, name, **content):
    """A module with `content`; modules below it are those of the package."""
    module = types.ModuleType(name)
    vars(module).update(content, __path__=[os.path.join(site, *name.split("."))])
    sys.modules[name] = module


def settings(args):
    """What both read of their command line or configuration, by Megatron-LM's names."""
    seconds = {
        "heartbeat_interval": 1, "heartbeat_timeout": 60, "barrier_timeout": 120, "completion_timeout": 120,
        "monitor_process_interval": 1, "monitor_thread_interval": 1, "last_call_wait": 1, "soft_timeout": 60,
        "hard_timeout": 90, "termination_grace_time": 1,
    }  # fmt: skip
    restart = {"active_world_size": 2, "granularity": "rank", "empty_cuda_cache": False, **seconds}
    return restart, SimpleNamespace(
        enable_ft_package=True, save=args.folder, async_save=False, calc_ft_timeouts=True, ft_num_warmup_iters=1,
        inprocess_restart=True, async_strategy="nvrx", **{f"inprocess_{name}": what for name, what in restart.items()},
    )  # fmt: skip


def lm(args):
    """Its two modules, what each call of the first one has, what its setup and its fault have, and the wrapper."""
    _, flags = settings(args)
    told = {"parse_args": lambda ignore_unknown_args: flags}
    stand_in(args.site, "megatron")
    stand_in(args.site, "megatron.core", rerun_state_machine=SimpleNamespace(destroy_rerun_state_machine=int))
    stand_in(args.site, "megatron.training", get_args=lambda: flags)
    stand_in(args.site, "megatron.training.arguments", **told)
    stand_in(args.site, "megatron.training.training", destroy_global_state=int)
    stand_in(args.site, "megatron.training.async_utils", reset_persistent_async_worker=str)
    stand_in(args.site, "megatron.training.global_vars", _ensure_var_is_not_initialized=lambda var, name: None)
    stand_in(args.site, "megatron.training.utils", is_rank0=lambda: rank() == 0, print_rank_0=print_rank_0)
    if args.fault and os.environ["NVRX_CYCLE"] == "0":
        os.environ["FT_SIM_FAULT_DESC"] = f"{args.fault};1;3"
    files = importlib.import_module("megatron.training.ft_integration")
    inside = importlib.import_module("megatron.training.inprocess_restart")
    return files, (), (), (), inside.maybe_wrap_for_inprocess_restart


def bridge(args):
    """As `lm`."""
    restart, flags = settings(args)
    more = {"enabled": True, "max_rank_faults": None, "monitor_process_logdir": None}
    fault = SimpleNamespace(
        calc_ft_timeouts=True, simulate_fault=bool(args.fault) and os.environ["NVRX_CYCLE"] == "0",
        simulated_fault_type=args.fault, simulated_fault_rank=1, simulated_fault_base_delay=3.0,
    )  # fmt: skip
    config = SimpleNamespace(checkpoint=flags, ft=fault)
    counts = {"is_setup_section_open": False, "seen_tr_iters_cnt": 0, "seen_checkpoints_cnt": 0}
    state = SimpleNamespace(
        cfg=config, rank_monitor_client=None, async_calls_queue=None, reset_for_restart=lambda: None,
        fault_tolerance_state=SimpleNamespace(curr_eval_iter_idx=0, is_persistent_chkpt_loaded=False, **counts),
    )  # fmt: skip
    configs = dict.fromkeys(("ConfigContainer", "FaultToleranceConfig", "InProcessRestartConfig"), object)
    for name in ("megatron", "megatron.bridge", "megatron.bridge.training", "megatron.bridge.utils"):
        stand_in(args.site, name)
    stand_in(args.site, "megatron.bridge.training.config", **configs)
    stand_in(args.site, "megatron.bridge.training.state", GlobalState=object)
    stand_in(args.site, "megatron.bridge.training.initialize", destroy_global_state=lambda: None)
    stand_in(args.site, "megatron.bridge.utils.common_utils", get_rank_safe=rank, print_rank_0=print_rank_0)
    files = importlib.import_module("megatron.bridge.training.fault_tolerance")
    inside = importlib.import_module("megatron.bridge.training.inprocess_restart")
    wrapper_config = SimpleNamespace(**restart, **more)
    return (
        files,
        (state,),
        (config, state),
        (fault,),
        lambda fn: inside.maybe_wrap_for_inprocess_restart(fn, wrapper_config, state),
    )


def step(number, weight):
    """One step of the training."""
    gradient = torch.tensor(float(number * (rank() + 1)))
    dist.all_reduce(gradient)
    weight += gradient / number**0.5
    time.sleep(0.05)
    print_rank_0(f"step {number}")


def monitored(args, files, state, to_setup, of_fault):
    """With the callbacks in the order in which the training loops of both call them."""
    path = f"{args.folder}/checkpoint"
    os.makedirs(args.folder, exist_ok=True)
    dist.init_process_group("gloo")
    files.setup(*to_setup)
    weight, start = torch.zeros(()), 0
    if os.path.exists(path):
        start, weight = torch.load(path, weights_only=True)
        files.on_checkpoint_loaded(False, *state)
    files.maybe_setup_simulated_fault(*of_fault)
    for number in range(start + 1, STEPS + 1):
        files.on_training_step_start(*state)
        step(number, weight)
        files.on_training_step_end(*state)
        if number % EVERY == 0:
            files.on_checkpointing_start(*state)
            if rank() == 0:
                torch.save((number, weight), f"{path}.new")
                os.replace(f"{path}.new", path)
            dist.barrier()
            files.on_checkpointing_end(False, *state)
    files.shutdown(*state)
    print_rank_0(f"final {weight.item()}")
    dist.destroy_process_group()


def inprocess(args, wrap):
    iterations = []

    def pretrain(inprocess_call_wrapper=None):  # Bridge's own adapter hands on None
        iterations.append(inprocess_call_wrapper)
        dist.init_process_group("gloo")
        print(f"iteration {len(iterations) - 1} rank {rank()}", flush=True)
        weight = torch.zeros(())
        for number in range(1, STEPS + 1):
            step(number, weight)
            if args.fault and len(iterations) == 1 and number == EVERY and rank() == 1:
                raise RuntimeError(args.fault)
        dist.barrier()
        print_rank_0(f"final {weight.item()}")
        dist.destroy_process_group()

    wrapped, _store = wrap(pretrain)
    wrapped()


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "error")
    vars(torch.cuda)["current_device"] = lambda: "cpu"
    torch.set_num_threads(1)
    given = parse_args()
    parts = (lm if given.who == "lm" else bridge)(given)
    if given.how == "monitored":
        monitored(given, *parts[:-1])
    else:
        inprocess(given, parts[-1])
