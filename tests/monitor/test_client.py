"""RankMonitorClient in this process, with a real rank monitor."""

import os
import sys
import types

import pytest
from monitor_harness import SOCKET, kill_monitor

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest
from nvrx_slurm.testing import standalone_monitor

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (SOCKET, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def refused(call, *args, **kwargs):
    with pytest.raises(RankMonitorClientError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


def test_without_a_launcher_it_says_how_to_start_or_on_request_does_nothing(monkeypatch, capsys):
    client = RankMonitorClient()
    assert "nvrx-run" in refused(client.init_workload_monitoring)
    client.shutdown_workload_monitoring()  # does nothing
    assert not client.is_initialized and client.cfg is None and client.rank_info is None
    monkeypatch.setenv("NVRX_DISABLE_RANK_MONITORS", "true")
    for client in (RankMonitorClient(), RankMonitorClient()):
        client.init_workload_monitoring()
        client.start_section("any")
        client.send_heartbeat()
        client.end_all_sections()
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload))
        calls = (client.should_stop, client.should_stop_together, client.calculate_and_set_hb_timeouts)
        assert not any(call() for call in (*calls, client.calculate_and_set_section_timeouts))
        assert client.cfg.safety_factor == 5.0 and client.state_dict() == {"current_timeouts": {}}
    assert capsys.readouterr().err.count("does nothing") == 1


def test_every_method_needs_init():
    client = RankMonitorClient()
    one_argument = ("start_section", "end_section", "report", "send_workload_control_request")
    calls = ("send_heartbeat", "end_all_sections", "should_stop", "should_stop_together")
    calls += ("calculate_and_set_hb_timeouts", "calculate_and_set_section_timeouts")
    calls += ("checkpoint_due", "checkpoint_due_together")
    with standalone_monitor():
        for _ in range(2):
            for name in (*one_argument, *calls):
                arguments = ("a",) * (name in one_argument)
                assert f"{name}() needs init" in refused(getattr(client, name), *arguments)
            client.init_workload_monitoring()
            client.shutdown_workload_monitoring()


def test_a_bad_environment_is_named(monkeypatch):
    init = RankMonitorClient().init_workload_monitoring
    monkeypatch.setenv(SOCKET, "/nonexistent/socket")
    assert "RANK is not set" in refused(init)
    monkeypatch.setenv("RANK", "three")
    assert "'three'" in refused(init)
    monkeypatch.setenv("RANK", "3")
    assert "/nonexistent/socket" in refused(init)
    monkeypatch.setenv(SOCKET, "/" + "x" * 200)
    assert "cannot be reached" in refused(init)
    for bad in (-1, 1.5, True, "5"):
        assert "num_warmup_iters" in refused(init, bad)


async def test_settings(rig):
    client = rig.rank(rank_heartbeat_timeout=30.0)
    client.init_workload_monitoring(num_warmup_iters=5)
    info, cfg = client.rank_info, client.cfg
    assert (info.global_rank, info.local_rank, info.pid) == (3, 0, os.getpid()) and info.host
    assert (cfg.rank_heartbeat_timeout, cfg.safety_factor, cfg.rank_termination_signal) == (30.0, 5.0, 9)
    for attempt in (lambda: setattr(cfg, "rank_heartbeat_timeout", 1), lambda: cfg.nonsense):
        with pytest.raises(AttributeError):
            attempt()
    assert "already called" in refused(client.init_workload_monitoring) and client.is_initialized


async def test_wrong_sections_are_errors_and_change_nothing(rig):
    client = rig.ready(rank_section_timeouts={"a": 30.0})
    before = client._page.words.tolist()
    for call in (client.start_section, client.end_section):
        call("unknown")
        call(None)
        with pytest.raises(TypeError):
            call(["a"])
    assert client._page.words.tolist() == before
    assert "'a' is not open" in refused(client.end_section, "a")
    client.start_section("a")
    assert "'a' is already open" in refused(client.start_section, "a")
    client.end_all_sections()
    client.end_all_sections()


async def test_a_forked_child_cannot_act_for_its_rank(rig):
    """The child tries all the time; the rank hangs and is found all the same."""
    worker = rig.worker(
        """
        client.init_workload_monitoring()
        client.send_heartbeat()
        if os.fork() == 0:
            while True:
                for call in (client.send_heartbeat, client.should_stop):
                    try:
                        call()
                        say("the child acts")
                    except RankMonitorClientError as error:
                        say(error)
                sys.stdin.readline()
        threading.Event().wait()
        """,
        rank_heartbeat_timeout=0.5,
    )
    rig.monitor.warn()
    for _ in range(2):
        assert "not in one forked" in await worker.line()
    assert (await rig.sentence()).startswith("no heartbeat for ")
    await worker.ended()
    assert not rig.monitor.leaves


@pytest.mark.parametrize("killed", [False, True])
async def test_a_warned_rank_hears_yes_until_its_end(rig, killed):
    """Even if the rank monitor is killed in between. The next rank knows nothing of it."""
    client = rig.rank()
    rig.monitor.warn()  # before init
    client.init_workload_monitoring()
    if killed:
        await kill_monitor(rig)
    assert not rig.monitor.leaves
    assert client.should_stop() and client.should_stop() and rig.monitor.leaves
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    assert client.should_stop_together() and rig.monitor.leaves
    rig.unwatch()
    client = rig.ready(cycle=1)
    assert not client.should_stop() and not client.should_stop_together() and not rig.monitor.leaves


def test_wrong_uses_of_collective_calls_and_states(monkeypatch):
    client = RankMonitorClient()
    with standalone_monitor():
        client.init_workload_monitoring()
        for every in (0, -1, 1.0, True):
            assert "every=" in refused(client.should_stop_together, every)
            assert "every=" in refused(client.checkpoint_due_together, every)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert "init_process_group" in refused(client.should_stop_together)
        assert "init_process_group" in refused(client.checkpoint_due_together)
        for calculate in (client.calculate_and_set_hb_timeouts, client.calculate_and_set_section_timeouts):
            assert "init_process_group" in refused(calculate, skip_if_not_ready=True)
        assert "section 'x'" in refused(client.calculate_and_set_section_timeouts, ["x"])
        assert "current_timeouts" in refused(client.load_state_dict, {})
        assert client.state_dict() == {"current_timeouts": {}}
        client.shutdown_workload_monitoring()


def test_a_checkpoint_is_due_after_the_best_interval(monkeypatch):
    """A save takes 2 s and a fault comes every 100 s: 20 s from one save to the next."""
    now_s = [1000.0]
    monkeypatch.setattr("nvrx_slurm.monitor.client.monotonic_ns", lambda: int(now_s[0] * 1e9))
    monkeypatch.setenv("NVRX_MTBF", "100")

    def due(after_s):
        now_s[0] += after_s
        return client.checkpoint_due()

    client = RankMonitorClient()
    with standalone_monitor(rank_section_timeouts={"checkpointing": None}):
        client.init_workload_monitoring()
        assert [due(100.0), due(10.0), due(0.0)] == [False, True, False]  # after sqrt(2 x 60 x 100) s
        client.start_section("checkpointing")
        now_s[0] += 2.0
        client.end_section("checkpointing")
        assert [due(19.0), due(2.0), client.checkpoint_due_together()] == [False, True, False]
        now_s[0] += 21.0
        assert [client.checkpoint_due_together(2), client.checkpoint_due_together(2)] == [True, False]
        client.shutdown_workload_monitoring()


def test_a_save_waits_two_seconds_for_a_judgement_that_does_not_come(monkeypatch):
    now_s = [1000.0]

    def sleep(seconds):
        now_s[0] += seconds

    monkeypatch.setattr("nvrx_slurm.monitor.client.monotonic_ns", lambda: int(now_s[0] * 1e9))
    monkeypatch.setattr("nvrx_slurm.monitor.client.sleep", sleep)
    client = RankMonitorClient()
    with standalone_monitor(rank_section_timeouts={"checkpointing": None}, loss_action="restart"):
        client.init_workload_monitoring()
        client.report(1, float("nan"))
        client.start_section("checkpointing")
        assert now_s[0] == pytest.approx(1002.0, abs=0.1)
        client.shutdown_workload_monitoring()


@pytest.mark.parametrize("warm_up", [True, False])
async def test_warm_up_ends_after_two_steps_by_megatrons_count(rig, monkeypatch, warm_up):
    arguments = types.SimpleNamespace()
    module = types.SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    client = rig.rank(rank_section_timeouts={"step": 0.15, "warmup": 0.3})
    client.init_workload_monitoring(num_warmup_iters=2)
    arguments.curr_iteration = 500
    client.start_section("step")
    client.end_section("step")
    arguments.curr_iteration = 501 if warm_up else 502
    client.start_section("step")
    assert (await rig.sentence()).startswith(
        "in section 'step' (warm-up) for " if warm_up else "in section 'step' for "
    )
