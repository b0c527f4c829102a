"""Layers: flags > environment > YAML > defaults; what contradicts itself is refused by name."""

import logging
import re
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvrx_slurm.config import layers
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.layers import SETTINGS, Config, resolve
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.errors import UsageError

pytestmark = pytest.mark.fast


# ft_launcher's and torchrun's own defaults; those that Slurm decides here differ on purpose.
THEIRS = {
    "rdzv_backend": "c10d", "max_restarts": 0, "monitor_interval": 0.3, "start_method": "spawn", "role": "default",
    "term_timeout": 1800, "workers_stop_timeout": 15, "ft_workload_check_interval": 5, "ft_safety_factor": 5,
    "ft_initial_rank_heartbeat_timeout": None, "ft_rank_heartbeat_timeout": None, "ft_rank_section_timeouts": {},
    "ft_rank_out_of_section_timeout": None, "ft_rank_termination_signal": signal.SIGKILL, "ft_log_level": logging.INFO,
    "ft_restart_check_interval": 60, "ft_node_health_check_interval": 5, "ft_enable_nic_monitor": False,
    "ft_enable_nic_healthcheck": True, "ft_enable_dist_storage_healthcheck": False, "ft_skip_section_response": True,
    "ft_numa_bind_strict": True, "ft_gpu_memory_reclaim_timeout": 50, "ft_gpu_memory_tolerance_mb": 512,
    "ft_gpu_memory_poll_interval": 2, "ft_max_no_progress_cycles": 3, "ft_min_progress_iterations": 1,
    "ft_install_exception_hook": False, "ft_num_warmup_iterations": 5, "ft_restart_policy": "any-failed",
    "ft_rdzv_impl": "barrier", "ft_no_restart_exit_code": 93, "ft_log_server_port": 50051,
    "ft_log_aggregator_count": 0, "ft_log_leaf_max_queue_chunks": -1, "ft_attribution_startup_timeout": 20,
    "ft_log_server_graceful_shutdown_timeout": 60, "ft_check_remaining_processes": False,
}  # fmt: skip


def test_defaults_are_theirs():
    assert {key: SETTINGS[key].default for key in THEIRS} == THEIRS and resolve({}, {}).config == Config()


def test_names_flags_and_variables_are_unique_and_described():
    for attribute in ("flags", "env"):
        names = [name for item in SETTINGS.values() for name in getattr(item, attribute)]
        assert len(names) == len(set(names))
    for item in SETTINGS.values():
        assert item.help.endswith((".", ".)")), item.key
        assert item.kind.parse(item.default) == item.default, item.key


LAYERS = {"flag": 8, "environment": 4, "yaml": 2}
TIMEOUTS = st.integers(1, 10**6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(LAYERS)), TIMEOUTS),
    st.sampled_from(["rank_heartbeat_timeout", "keepalive_timeout"]),
)
def test_the_highest_layer_wins(tmp_path, given_in, name):
    path = tmp_path / "ft.yaml"
    path.write_text(f"fault_tolerance:\n  {name}: {given_in['yaml']}\n" if "yaml" in given_in else "fault_tolerance:\n")
    flags = {"ft_cfg_path": str(path)} | ({f"ft_{name}": str(given_in["flag"])} if "flag" in given_in else {})
    environ = {f"NVRX_FT_{name.upper()}": str(given_in["environment"])} if "environment" in given_in else {}
    resolved = resolve(flags, environ)
    winner = max(given_in, key=LAYERS.__getitem__, default="default")
    assert resolved.origins[f"ft_{name}"].layer == winner
    assert getattr(resolved.config.ft, name) == given_in.get(winner, getattr(Config().ft, name))


def test_origins_read_well(tmp_path):
    path = tmp_path / "ft.yaml"
    path.write_text("a:\n  fault_tolerance: {log_level: DEBUG}\n")
    for name in ("PET_FT_CFG_PATH", "NVRX_FT_CFG_PATH"):
        assert resolve({}, {name: str(path)}).config.ft.log_level == logging.DEBUG
    origins = resolve({"nnodes": "2", "ft_cfg_path": str(path)}, {"PET_MAX_RESTARTS": "3"}).origins
    keys = ["nnodes", "max_restarts", "ft_log_level", "ft_segment"]
    assert [str(origins[key]) for key in keys] == [
        "--nnodes", "environment PET_MAX_RESTARTS", f"{path}: a.fault_tolerance.log_level", "default",
    ]  # fmt: skip


def test_environment_sentences():
    with pytest.raises(UsageError, match="^PET_NNODES='3:2': must be MIN or MIN:MAX"):
        resolve({}, {"PET_NNODES": "3:2"})
    assert resolve({"nnodes": "2"}, {"PET_NNODES": "3:2"}).config.launch.nnodes == (2, 2)
    assert resolve({}, {"PET_NNODES": "", "NVRX_FT_SEGMENT": ""}).config == Config()
    with pytest.raises(UsageError, match="NVRX_FT_LOG_LEVL is not a known variable; did you mean NVRX_FT_LOG_LEVEL"):
        resolve({}, {"NVRX_FT_LOG_LEVL": "INFO"})
    given = {"NVRX_MAX_RESTARTS": "3", "NVRX_SPARE": "1", "NVRX_SUBMIT_NODE": "1", "NVRX_IMAGE": "mine"}
    near = [(note.split()[0], note.split()[-1]) for note in resolve({}, given).notes]
    assert near == [("NVRX_MAX_RESTARTS", "PET_MAX_RESTARTS?"), ("NVRX_SPARE", "NVRX_SPARES?")]
    source = "".join(path.read_text() for path in Path(layers.__file__).parents[1].rglob("*.py"))
    own = dict.fromkeys(set(re.findall(r'"(NVRX_[A-Z_]*[A-Z])"', source)) - {"NVRX_SLURM_API"}, "1")
    assert len(own) > 15 and resolve({}, own).notes == ()
    with pytest.raises(UsageError, match="PET_FT_SEGMENT is not a known variable; did you mean NVRX_FT_SEGMENT"):
        resolve({}, {"PET_FT_SEGMENT": "1"})


VALUES = ("true", "false", "7", "/x/y", "lib", "log", "static", "min-healthy", "auto", "0:1", "join_timeout=5",
          "hang:1", "a:1", "USR1", "text")  # fmt: skip


def another_value(key):
    """A value that is fine, and not the default where there is another one."""
    item = SETTINGS[key]
    for text in VALUES:
        try:
            if item.kind.parse(text) != item.default:
                return text
        except ValueError:
            continue
    return str(item.default)


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ({"nnodes": "2:3", "spares": "2"}, "--spares 2 contradicts"),
        ({"nnodes": "2:3", "node_rank": "3"}, "--node-rank 3 is not a place among --nnodes 2:3"),
        ({"standalone": True, "nnodes": "1:2"}, "--standalone is one node"),
        ({"no_python": True, "module": True}, "exclude each other"),
        ({"rdzv_backend": "etcd"}, "--rdzv-backend 'etcd': must be c10d or static"),
        ({"ft_restart_policy": "never"}, "--ft-restart-policy 'never': must be any-failed or min-healthy"),
        ({"ft_warn_before_end": "60", "ft_stop_before_end": "60"}, "--ft-warn-before-end 60 comes no sooner than"),
        ({"ft_warn_before_end": "60", "ft_warning_signal": "none"}, "warns by --ft-warning-signal, which is none"),
        ({"log_dir": "x" * 5000}, "must be a path"),
    ],
)
def test_contradictions_and_bad_flags(flags, sentence):
    with pytest.raises(UsageError, match=sentence) as caught:
        resolve(flags, {})
    assert len(str(caught.value)) < 300


def test_what_changes_nothing_is_said():
    flags = {"monitor_interval": "1", "rdzv_backend": "static", "rdzv_conf": "read_timeout=5"}
    flags["ft_rank_out_of_section_timeout"] = "5"
    notes = resolve(flags, {"NVRX_FT_SKIP_SECTION_RESPONSE": "no"}).notes
    none = ("--rdzv-backend", "--monitor-interval", "NVRX_FT_SKIP_SECTION_RESPONSE", "--ft-rank-out-of-section-timeout")
    expected = [*(f"{name} has no effect" for name in none), "--rdzv-conf"]
    assert [note.split(":")[0] for note in notes] == expected
    assert resolve({"monitor_interval": "0.3", "rdzv_backend": "c10d"}, {}).notes == ()


def test_nodes_and_endpoints():
    """tests/cli/test_here.py has more of them."""
    assert LaunchConfig(nnodes=NodeRange(2, 3)).node_range(8) == (2, 3)
    for launch, have in ((LaunchConfig(spares=4), 4), (LaunchConfig(spares=1), None)):
        with pytest.raises(UsageError, match="leaves no node"):
            launch.node_range(have)
    assert LaunchConfig().endpoint is None
    assert LaunchConfig(rdzv_endpoint="h").endpoint == ("h", 29400)
    assert LaunchConfig(master_addr="m").endpoint == ("m", 29500)
    assert LaunchConfig(master_addr="m", master_port=1, rdzv_endpoint="h:2").endpoint == ("h", 2)
    assert LaunchConfig(master_addr="m", standalone=True).endpoint is None


def test_values_are_checked_in_python_too():
    with pytest.raises(UsageError, match="LaunchConfig: max_restarts=-1 must be a whole number"):
        LaunchConfig(max_restarts=-1)
    for cycles in (3, 0):
        config = FaultToleranceConfig(checkpoint_iteration_file="/x", max_no_progress_cycles=cycles)
        assert config.is_progress_tracking_enabled == (cycles > 0)
