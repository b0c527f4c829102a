"""Fixtures for the whole suite."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import standin
from minicluster import MiniCluster
from ranks_harness import Zygote

# torch asks the name server for the name of every address that it connects to. One that is silent for a moment would
# cost seconds each time, and a rank that waits for it is taken for hung. No test needs a name server (resolv.conf(5)).
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A proxy of the user is for what `scripts/test` installs, and not for the addresses of this machine.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "localhost,127.0.0.1")))

# `nohup scripts/test &` makes all children ignore these signals, and tests send them.
for _signum, _usual in {
    signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL,
}.items():  # fmt: skip
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)


TESTS = Path(__file__).parent
# Each test has one tier: its own mark of these, else that of its folder (or file) here.
TIERS = ("fast", "process", "slurm", "matrix")
TIER_OF = {
    **dict.fromkeys(
        (
            "cli",
            "config",
            "control",
            "core",
            "sim",
            "system",
            "views",
            "test_density.py",
            "test_fuzz.py",
            "test_mutations.py",
            "test_tidy.py",
        ),
        "fast",
    ),
    **dict.fromkeys(("node", "attribution", "examples", "health", "inprocess", "logs", "monitor", "ptl"), "process"),
    "slurm": "slurm",
    "test_warm_table.py": "matrix",
    # Files that differ from their folder.
    **dict.fromkeys(("test_corpus.py", "test_hang.py", "test_redact.py", "test_rules.py"), "fast"),
    **dict.fromkeys(("test_kept.py", "test_drains.py", "test_policy.py", "test_kernel_log.py"), "fast"),
    **dict.fromkeys(("test_api_faults.py", "test_api_text.py", "test_env.py", "test_nodelist.py"), "fast"),
    "test_control.py": "fast",
    **dict.fromkeys(("test_bad_input.py", "test_wire_streams.py", "test_wire_strangers.py"), "process"),
    **dict.fromkeys(("test_hostile_tree.py", "test_docs.py", "test_gpu_trial.py", "test_numa.py"), "process"),
}
# Repeats of a test with other values, which only the matrices run: by name, and the beginning of their value's id.
REPEATS = {
    "test_the_rank_that_the_others_wait_for_is_named": ("spins", "vfork"),
    "test_a_stopped_rank_is_noticed_by_a_learned_limit_and_the_training_goes_on": ("ddp", "sections"),
    "test_ranks_of_a_part_that_is_cut_off_end_before_they_run_elsewhere": (
        "unplug-hosts1", "deafen", "mute", "separate",
    ),
    "test_heartbeats_through_two_jobs": ("pytorch_lightning",),
    "test_every_byte_is_merged_once_under_kills_terms_and_cuts": ("1",),
    "test_a_plugin_that_never_returns_costs_its_rank_only": ("health_check", "initialize", "terminate"),
    "test_their_client_asks_our_service": ("unix",),
    "test_equal_failures_over_requeues_give_stop": ("third2", "third3", "third4"),
    "test_workers_get_the_alias_before_an_installed_nvrx": ("-m", "--no-python", "a.py"),
    "test_a_wrong_loss": ("warn", "stop"),
    "test_basic_without_a_launcher": ("SIGKILL",),
    "test_damaged_newest_checkpoint_is_skipped": ("flip",),
    "test_a_service_that_misbehaves_costs_the_training_nothing": ("None",),
    "test_a_language_model_that_misbehaves_costs_the_training_nothing": ("hangs",),
    "test_a_result_that_megatron_rejects_is_computed_on_other_nodes": ("transient", "application"),
    # Some shapes on loopback, one of them on Slurm; the matrices run all.
    "test_takeover.py::test_all_processes_of_a_rank_end_before_it_runs_elsewhere": (
        "stopped-first", "stopped-spare", "stopped-daemon", "-popen",
    ),
    "test_nvrx_run_any_node.py::test_all_processes_of_a_rank_end_before_it_runs_elsewhere": (
        "stopped-setsid", "stopped-popen", "stopped-daemon", "stopped-first", "stopped-spare", "killed",
    ),
}  # fmt: skip
# Combinations of facts that other tests hold one by one: by name, for the matrices only.
COMBINATIONS = {
    "test_under_the_default_policy_exceptions_stay_in_process_and_a_dead_process_restarts_all",
    "test_a_segment_of_a_replacement_group_moves_as_a_whole",
    "test_a_task_of_a_job_array_is_a_replacement_group",
    "test_two_agents_per_node_survive_a_killed_rank_and_a_lost_node",
    "test_after_a_shrink_the_next_one_uses_the_nodes_that_are_left",
    "test_a_script_of_the_documents_requeues_itself_when_it_is_warned",
    "test_a_coordinator_is_killed_after_ranks_were_warned",
    "test_a_late_node_finds_the_coordinator_by_any_endpoint",
    "test_an_excluded_node_that_comes_back_is_refused",
    "test_without_its_batch_host_the_job_is_requeued_by_an_agent",
    "test_the_job_of_a_lost_batch_host_is_ended_once_slurmctld_answers",
    "test_several_in_one_allocation",
    "test_a_preempted_job_goes_on_in_its_next_life",
    "test_a_candidate_says_that_it_waits_for_votes",
    "test_a_stopped_coordinator_does_not_take_the_file_back",
}
_NO_FAST = {"node", "examples", "inprocess", "logs", "monitor", "ptl"}
# Files on a real Slurm that take as long as all others together.
SLURM_B = {"test_nvrx_run_ends.py", "test_nvrx_run_survives.py", "test_nvrx_run_fronts.py"}
SLURM_C = {"test_every_version.py", "test_ordinary_user.py", "test_nvrx_submit.py"}  # the first two bring up their own


def tiers(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers() if mark.name in TIERS}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m fast` does not import what only slower tests need, as torch."""
    skip = config.option.markexpr == "fast" and collection_path.parent == TESTS and collection_path.name in _NO_FAST
    return True if skip else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tiers. With pytest-xdist's --dist loadgroup real Slurms are on three workers, each with clusters of its own."""
    for item in items:
        known = [TIER_OF[part] for part in item.path.relative_to(TESTS).parts if part in TIER_OF]
        name, _, value = item.name.partition("[")
        repeats = REPEATS.get(f"{item.path.name}::{name}") or REPEATS.get(name, ("]",))
        if name in COMBINATIONS or (value and value.startswith(repeats)):
            item.add_marker("matrix")
        elif known and not tiers(item):
            item.add_marker(known[-1])
        if "needs_slurm" in getattr(item, "fixturenames", ()):
            group = "slurm-c" if item.path.name in SLURM_C else "slurm-b" if item.path.name in SLURM_B else "slurm-a"
            item.add_marker(pytest.mark.xdist_group(group))
        elif "zygote" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("zygote"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """The beginning of a long text: pytest-xdist sends the name of a test many times."""
    return ascii(val[:40]) if isinstance(val, (str, bytes)) and len(val) > 400 else None


@pytest.fixture(autouse=True)
def no_signal_stays_blocked() -> Iterator[None]:
    """All children that later tests start would inherit it, and survive the signal."""
    yield
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert not blocked, f"the test leaves {blocked} blocked"


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    """Skip, with the reason, where Slurm is not installed; fail instead if NVRX_REQUIRE_SLURM=1."""
    if reason := MiniCluster.available():
        if os.environ.get("NVRX_REQUIRE_SLURM") == "1":
            pytest.fail(f"NVRX_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def nvml_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a libnvidia-ml.so.1 that does as told (tests/nvml); skips without a compiler."""
    try:
        return standin.built(tmp_path_factory.mktemp("nvml"))
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Has imported torch, once for all tests, and what every optimizer imports."""
    pytest.importorskip("torch")
    process = Zygote("scenarios_calls", "torch._dynamo")
    yield process
    process.close()


@pytest.fixture
def cluster_root() -> Iterator[Path]:
    """A short, private directory for one more cluster (pytest's own are too long for Unix sockets)."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def shared_cluster(needs_slurm: None) -> Iterator[MiniCluster]:
    """The cluster of this worker; tests use `minicluster`, which resets it first."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    cluster = MiniCluster(root, nodes=4, kill_wait_s=8, die_with_owner=True).up()  # ranks get 3 s to end
    try:
        yield cluster
    finally:
        stray = cluster.down()
    assert stray == [], f"processes that were not below any node of the minicluster: {stray}"
    assert cluster.scan() == [], "the minicluster left processes"
    shutil.rmtree(root)


@pytest.fixture
def minicluster(shared_cluster: MiniCluster) -> MiniCluster:
    """A real Slurm cluster of 4 idle nodes, n1..n4, with no job."""
    shared_cluster.reset()
    return shared_cluster
