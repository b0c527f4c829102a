"""The Lightning callbacks with a real Trainer (ddp on a CPU, one rank) and a real rank monitor, in both packages."""

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks_harness import Script, Zygote
from waits import WAIT_S

ROOT = str(Path(__file__).resolve().parents[2])

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.xdist_group("lightning")]  # imported once
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
INSTALLED = [path for name, path in PACKAGES.items() if importlib.util.find_spec(name)]


PROGRAM = """
import json, logging, os, signal, sys, threading, warnings
sys.path.insert(0, {root!r})
warnings.simplefilter("ignore")
import {package} as pl
from {package}.demos.boring_classes import BoringModel
from {package}.callbacks import Callback, ModelCheckpoint
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.testing import standalone_monitor
from nvrx_slurm import ptl_resiliency
from nvrx_slurm.ptl_resiliency import FaultToleranceCallback, FaultToleranceSectionsCallback

class Raise(Callback):
    def __init__(self, error, step=0):
        self.error, self.step = error, step
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step >= self.step:
            raise self.error

B, S = FaultToleranceCallback, FaultToleranceSectionsCallback
said = {{}}
HEARTBEATS = dict(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=60.0)
SECTIONS = dict(rank_section_timeouts=dict(setup=60.0, step=60.0, checkpointing=60.0), rank_out_of_section_timeout=60.0)

def fit(*callbacks, ckpt=None, strategy="ddp", model=None, **more):
    save = ModelCheckpoint(dirpath="ckpt", save_last=True, every_n_train_steps=5)
    options = dict(max_steps=30, limit_val_batches=2, val_check_interval=10) | more
    trainer = pl.Trainer(strategy=strategy, devices=1, accelerator="cpu", logger=False, enable_progress_bar=False,
                         enable_model_summary=False, default_root_dir=".", callbacks=[*callbacks, save], **options)
    trainer.fit(model or BoringModel(), ckpt_path=ckpt)
    return trainer

{code}
with open("said.json", "w") as file:
    json.dump(said, file)
"""


@pytest.fixture(scope="module")
def zygotes():
    """By the package that it has imported; made when it is needed."""
    made = {}
    yield made
    for one in made.values():
        one.close()


@pytest.fixture
def run(zygotes, tmp_path):
    """Runs a program; what it said, and its stderr."""
    if not INSTALLED:
        pytest.skip("neither lightning nor pytorch_lightning is installed (extra: lightning)")
    programs = []

    def run_one(code, package=INSTALLED[0], returncode=0):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.format(root=ROOT, package=package, code=textwrap.dedent(code)))
        if package not in zygotes:
            zygotes[package] = Zygote("torch._dynamo", package)
        env = {"OMP_NUM_THREADS": "1", "FAULT_TOL_FINISHED_FLAG_FILE": "finished"}
        programs.append(Script(zygotes[package], [str(program)], env, tmp_path / "program.err"))
        _, errors = programs[0].communicate(WAIT_S)
        assert programs[0].returncode == returncode, errors
        path = tmp_path / "said.json"
        return (json.loads(path.read_text()) if path.exists() else {}), errors

    yield run_one
    for one in programs:
        one.close()


def test_a_warned_fit_saves_though_lightning_does_not_take_slurm_for_its_environment(run):
    """In a task of Slurm's; a rank of torchrun's has another environment, and no requeue of Lightning's."""
    code = """
    os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "job", "SLURM_PROCID": "0", "TORCHELASTIC_RUN_ID": "1"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    class SaveBeforeTheEnd(Callback):
        def on_train_batch_end(self, trainer, *_):
            said["environment"] = type(trainer.strategy.cluster_environment).__name__
            if trainer.global_step == 7:
                monitor.warn()
            if callback.fault_tol_client.should_stop_together(every=5):
                trainer.save_checkpoint("last.ckpt")
                trainer.should_stop = True
                said["step"] = trainer.global_step
    with standalone_monitor(**HEARTBEATS) as monitor:
        callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=False, exp_dir=".")
        fit(callback, SaveBeforeTheEnd(), max_steps=50)
    said["files"] = [os.path.exists("last.ckpt"), os.path.exists("finished")]
    """
    said, _ = run(code)
    assert said == {"environment": "TorchElasticEnvironment", "step": 10, "files": [True, False]}


@pytest.mark.repeats("pytorch_lightning")
@pytest.mark.parametrize("package", INSTALLED)
def test_heartbeats_through_two_jobs(run, package):
    """The first job has no checkpoint to load and learns nothing; the second one does, and is the last."""
    code = """
    with standalone_monitor(**HEARTBEATS) as monitor:
        callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=True, exp_dir=".")
        said["package"] = type(callback).__mro__[2].__module__
        fit(callback, max_steps=20, max_time={"seconds": 3600})
        said["after one"] = [os.path.exists("_ft_state.json"), os.path.exists("finished"), callback.is_initialized]
        os.unlink("finished")
        callback = FaultToleranceCallback(autoresume=True, calculate_timeouts=True, exp_dir=".")
        fit(callback, ckpt="ckpt/last.ckpt")
        said["after two"] = [json.load(open("_ft_state.json")), os.path.exists("finished")]
        seen = []
        class Look(Callback):
            def on_train_start(self, *_):
                seen.append(callback.fault_tol_client.hb_timeouts.were_calculated)
        callback = FaultToleranceCallback(autoresume=False, calculate_timeouts=True, exp_dir=".")
        fit(callback, Look(), ckpt="ckpt/last.ckpt", max_steps=40)
        said["loaded"] = seen
        said["hangs"] = monitor.hangs
    """
    said, _ = run(code, package)
    assert said["package"].startswith(package)
    assert said["after one"] == [False, True, False]
    state, finished = said["after two"]
    beats = state["current_timeouts"]["heartbeat"]
    assert beats["were_calculated"] and beats["initial"] > 0 and beats["subsequent"] > 0
    assert finished and said["loaded"] == [True] and said["hangs"] == []


def test_sections_through_two_jobs(run):
    code = """
    def learned():
        return json.load(open("_ft_state_.json"))["current_timeouts"]["section"]
    opened = []
    start = RankMonitorClient.start_section
    RankMonitorClient.start_section = lambda client, name: (opened.append(name), start(client, name))
    with standalone_monitor(**SECTIONS) as monitor:
        callback = FaultToleranceSectionsCallback(autoresume=False, calculate_timeouts=True, exp_dir=".")
        trainer = fit(callback, max_steps=20)
        said["first"] = learned()
        said["unwrapped"] = "save_checkpoint" not in vars(trainer.strategy)
        said["opened"] = list(opened)
        fit(FaultToleranceSectionsCallback(False, True, exp_dir="."), ckpt="ckpt/last.ckpt", max_steps=45)
        said["second"] = learned()
        said["hangs"] = monitor.hangs
    """
    said, _ = run(code)
    assert said["first"]["calculated_sections"] == ["checkpointing", "step"]
    assert not said["first"]["is_out_of_section_calculated"]
    assert said["second"]["calculated_sections"] == ["checkpointing", "setup", "step"]
    assert said["second"]["is_out_of_section_calculated"] and said["second"]["out_of_section"] > 0
    assert said["opened"][0] == "setup" and said["opened"].count("setup") == 1
    assert said["opened"].count("step") == 20 + 2 * 2 + 2  # batches, two validations, the sanity check
    assert said["opened"].count("checkpointing") >= 4
    assert said["unwrapped"] and said["hangs"] == []


def test_failures_and_exits(run):
    """A failed fit learns nothing, calls nothing collective and flags nothing; sys.exit(0) is an end in order."""
    code = """
    calls = []
    calculate = RankMonitorClient.calculate_and_set_section_timeouts
    RankMonitorClient.calculate_and_set_section_timeouts = lambda *a, **k: (calls.append(1), calculate(*a, **k))[1]
    for name, error in dict(failure=ValueError("no"), exit=SystemExit(0), exit3=SystemExit(3)).items():
        for cls, limits in ((B, HEARTBEATS), (S, SECTIONS)):
            calls.clear()
            with standalone_monitor(**limits) as monitor:
                callback = cls(autoresume=True, calculate_timeouts=True, exp_dir=".")
                try:
                    fit(callback, Raise(error, 12))
                except BaseException as caught:
                    said[f"{name} {cls.__name__}"] = [type(caught).__name__, callback.is_initialized, len(calls)]
    said["finished"] = os.path.exists("finished")
    """
    said, _ = run(code)
    at_checkpoints = 2  # after 5 and 10 batches
    assert said == {
        "failure FaultToleranceCallback": ["ValueError", False, 0],
        "failure FaultToleranceSectionsCallback": ["ValueError", False, at_checkpoints],
        "exit FaultToleranceCallback": ["SystemExit", False, 0],
        "exit FaultToleranceSectionsCallback": ["SystemExit", False, at_checkpoints + 1],
        "exit3 FaultToleranceCallback": ["SystemExit", False, 0],
        "exit3 FaultToleranceSectionsCallback": ["SystemExit", False, at_checkpoints],
        "finished": False,
    }


def test_a_policy_turns_exceptions_into_requests(run):
    """What the launcher gets to hear of a failed fit; the script always sees its own exception."""
    code = """
    from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest
    exceptions = __import__(pl.__name__ + ".utilities.exceptions", fromlist=["x"])
    def policy(error):
        asked.append(type(error).__name__)
        answer = answers.get(type(error))
        if isinstance(answer, Exception):
            raise answer
        return answer
    answers = {
        ZeroDivisionError: WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "it cannot divide"),
        ValueError: WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "no such data"),
        KeyError: "a string",
        OSError: RuntimeError("in the policy"),
    }
    errors = [ZeroDivisionError("0"), KeyError("k"), OSError("o"), SystemExit(3), SystemExit(0),
              exceptions.SIGTERMException(), ValueError("no such data")]
    for error in errors:
        asked = []
        with standalone_monitor(**SECTIONS) as monitor:
            callback = FaultToleranceSectionsCallback(True, False, exc_handling_policy=policy)
            try:
                fit(callback, Raise(error), strategy="auto")
            except BaseException as caught:
                raised = type(caught).__name__
            if isinstance(error, (ArithmeticError, ValueError)):
                monitor.wait_for_request(20.0)
            requests = [[one.action.name, one.description] for one in monitor.requests]
            said[repr(error)] = [raised, asked, requests, os.path.exists("finished"), callback.is_initialized]
    """
    said, stderr = run(code)
    excluded, shut_down = ["ExcludeThisNode", "it cannot divide"], ["ShutdownWorkload", "no such data"]
    assert list(said.values()) == [
        ["ZeroDivisionError", ["ZeroDivisionError"], [excluded], False, False],
        ["KeyError", ["KeyError"], [], False, False],
        ["OSError", ["OSError"], [], False, False],
        ["SystemExit", ["SystemExit"], [], False, False],
        ["SystemExit", [], [], False, False],
        ["SIGTERMException", [], [], False, False],  # the launcher stops this rank: that is no failure of it
        ["ValueError", ["ValueError"], [shut_down], True, False],
    ]
    for token in ("KeyError('k')", "not str", "RuntimeError: in the policy", "after ZeroDivisionError('0')"):
        assert token in stderr


def test_what_is_missing_is_said(run):
    code = """
    def error(make, strategy="ddp", **limits):
        with standalone_monitor(**limits):
            try:
                fit(make(), strategy=strategy, max_steps=1)
                return "no error"
            except (RankMonitorClientError, ValueError, ImportError) as error:
                return str(error)
    said["group"] = error(lambda: B(False, True), strategy="auto", **HEARTBEATS)
    said["no group needed"] = error(lambda: B(False, False), strategy="auto", **HEARTBEATS)
    del os.environ["FAULT_TOL_FINISHED_FLAG_FILE"]
    said["flag"] = error(lambda: B(True, False), **HEARTBEATS)
    said["timeouts"] = error(lambda: B(False, False))
    said["sections"] = error(lambda: S(False, False), rank_section_timeouts=dict(setup=60.0))
    said["directory"] = error(lambda: B(False, True, exp_dir="nowhere"), **HEARTBEATS)
    said["fault"] = error(lambda: B(False, True, {"fault_type": "x", "base_delay": 1}))
    open("_ft_state.json", "w").write("{")
    said["damaged"] = error(lambda: B(False, True, exp_dir="."), **HEARTBEATS)
    try:
        fit(B(False, False), max_steps=1)
    except RankMonitorClientError as e:
        said["no launcher"] = str(e)
    os.environ["NVRX_DISABLE_RANK_MONITORS"] = "1"
    said["disabled"] = str(fit(B(True, True), S(False, True), strategy="auto", max_steps=1).global_step)
    """
    said, stderr = run(code)
    tokens = {
        "flag": "FAULT_TOL_FINISHED_FLAG_FILE", "timeouts": "--ft-rank-heartbeat-timeout", "directory": "nowhere",
        "sections": "step, checkpointing", "fault": "fault_type", "group": "process group", "damaged": "no error",
        "no group needed": "no error", "no launcher": "nvrx-run", "disabled": "1",
    }  # fmt: skip
    assert said.keys() == tokens.keys() and all(token in said[name] for name, token in tokens.items()), said
    assert "_ft_state.json" in stderr


def test_a_simulated_fault_hits_the_rank(run):
    code = """
    fault = {"fault_type": "rank_killed", "base_delay": 0.2, "rand_delay": 0.1}
    with standalone_monitor(**HEARTBEATS):
        fit(FaultToleranceCallback(False, False, fault), max_steps=-1, max_epochs=-1)
    """
    run(code, returncode=-9)


def test_a_fit_goes_on_from_memory_as_if_nothing_had_happened(run):
    """Also without a checkpoint on the disk. Steps, optimizers and schedulers are those of the fit that was killed."""
    code = """
    import torch
    from functools import partial
    from nvrx_slurm.checkpoint import link, rank
    rank.start = partial(link.start, linger_s=0.5)
    rank.launcher_pid = lambda environ: os.getpid()
    class Model(BoringModel):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": "step"}]
        def training_step(self, batch, index):  # a function of the step: Lightning does not save where the data is
            generator = torch.Generator().manual_seed(self.trainer.global_step)
            return self.layer(torch.randn(4, 32, generator=generator)).square().mean()
    def weights(*callbacks, fault=None, steps=20):
        pl.seed_everything(1)
        model = Model()
        try:
            fit(*callbacks, *([Raise(ValueError("a fault"), fault)] if fault else []), model=model, max_steps=steps)
        except ValueError:
            return None
        return [one.tolist() for one in model.parameters()]
    class Begins(Callback):
        def on_train_start(self, trainer, *_):
            begins.append(trainer.global_step)
    begins = []
    memory = ptl_resiliency.MemoryCheckpoint
    said["undisturbed"] = weights(Begins())
    said["first"] = weights(memory(3), Begins(), fault=11)
    said["second"] = weights(memory(3), Begins())
    said["begins"] = begins
    """
    said, _ = run(code)
    assert said["begins"] == [0, 0, 9] and said["first"] is None
    assert said["second"] == said["undisturbed"]


def test_the_package_imports_no_lightning():
    code = (
        f"import sys; sys.path.insert(0, {ROOT!r}); import nvrx_slurm.ptl_resiliency as p\n"
        "assert not {'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules)\n"
        "print(p.SimulatedFaultParams('random', 1.0))\n"
        "sys.modules.update(lightning=None, pytorch_lightning=None)\n"
        "try:\n    p.FaultToleranceCallback\nexcept ImportError as error:\n    print(error)\n"
        "sys.modules.update(transformers=None)\n"
        "try:\n    import nvrx_slurm.huggingface\nexcept ImportError as error:\n    print(error)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert "SimulatedFaultParams(fault_type='random'" in said
    assert "pip install 'nvrx_slurm[lightning]'" in said and "pip install 'nvrx_slurm[transformers]'" in said
