"""The command line: every spelling reaches its field, the script's arguments stay its own, errors are one sentence."""

from pathlib import Path

import configdoc
import pytest
from click.testing import CliRunner
from test_layers import another_value

from nvrx_slurm.cli.options import USUAL, nvrx_run_options, print_config, spelling
from nvrx_slurm.config.layers import SETTINGS, resolve
from nvrx_slurm.errors import ExitCode, NvrxError
from nvrx_slurm.types import FaultKind

pytestmark = pytest.mark.fast


ROOT = Path(__file__).parents[2]
CALLS = []


def body(resolved, script, args):
    """Start training."""
    CALLS.append((resolved, script, args))
    if script == "refused":
        error = NvrxError("no way")
        error.exit_code = ExitCode.NO_RESTART
        raise error
    return 94 if script == "fails" else 0


COMMAND = nvrx_run_options(body)


def run(*words, env=None):
    CALLS.clear()
    return CliRunner().invoke(COMMAND, list(words), env=env), list(CALLS)


def called(*words):
    result, calls = run(*words)
    assert result.exit_code == 0, result.output
    return calls[0]


def refused(*words):
    result, calls = run(*words)
    assert (result.exit_code, calls) == (2, []) and result.output.count("\n") == 1
    assert result.output.startswith("nvrx-run: ")
    return result.output[len("nvrx-run: ") : -1]


NEED_PREFIX = ("ft_nvrx_logfile", "ft_log_server_grpc_port")
GIVEN = [item for item in SETTINGS.values() if item.flags and item.key != "print_config"]


def test_every_flag_reaches_its_field(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("cfg").write_text("fault_tolerance:")
    for item in GIVEN:
        value = [] if item.form == "switch" else ["cfg" if item.key == "ft_cfg_path" else another_value(item.key)]
        prefix = ["--ft-per-cycle-applog-prefix=/x"] if item.key in NEED_PREFIX else []
        for flag in item.flags:
            assert called(*prefix, flag, *value, "train.py")[0].origins[item.key].name == item.flags[0]


def test_every_spelling_is_the_flag():
    for flag in {flag for item in GIVEN for flag in item.flags if flag.startswith("--")}:
        name = flag.removeprefix("--").replace("-", "_")
        spellings = [name, name.replace("_", "-", 1)]
        if name.startswith("ft_"):
            spellings += [f"ft-param-{name[3:]}", f"ft_param_{name[3:]}"]
        assert {f"--{spelling(one)}" for one in spellings} == {flag}


def test_seed_spellings():
    assert called("--ft_storage_health_check_path", "/data", "t")[0].config.ft.storage_healthcheck_path == "/data"
    ft = called("--ft-node_health_check_endpoint", "unix:///x", "t")[0].config.ft
    assert ft.node_health_check_endpoint == "/x"
    assert called("--ft_enable_dist_storage_healthcheck", "true", "t")[0].config.ft.enable_dist_storage_healthcheck
    assert "does not exist" in refused("--fault-tol-cfg-path", "/none.yaml", "t")
    called("--fault-tol-cfg-path=/none.yaml", "--ignore-missing-fault-tol-cfg", "t")
    assert called("--restart-policy=min-healthy", "t")[0].config.ft.restart_policy == "min-healthy"
    by_fault = called("--ft-max-restarts-by-fault=hang:2,node-lost:0", "t")[0].config.ft.max_restarts_by_fault
    assert by_fault == {FaultKind.HANG: 2, FaultKind.NODE_LOST: 0}


def test_the_scripts_arguments_are_its_own():
    assert called("-m", "pkg", "--lr", "1")[1:] == ("pkg", ("--lr", "1"))
    resolved, script, args = called("train.py", "--nnodes", "7", "--", "-x", "--help")
    assert (script, args) == ("train.py", ("--nnodes", "7", "--", "-x", "--help"))
    assert resolved.config.launch.nnodes is None
    assert called("--nnodes=2", "--", "train.py", "--", "x")[1:] == ("train.py", ("--", "x"))
    assert called("--nnodes=2", "--", "--odd-name.py")[1:] == ("--odd-name.py", ())


def test_short_flags_and_repeats():
    words = ("-t3", "-r", "0:1,1:2", "--srun-arg", "--exclusive", "--srun-arg=-x a", "--nnodes=1", "--nnodes=2", "t")
    launch = called(*words)[0].config.launch
    assert (str(launch.tee), str(launch.redirects), launch.srun_args) == ("3", "0:1,1:2", ("--exclusive", "-x a"))
    assert launch.nnodes == (2, 2)
    launch = called("-t=3", "--redirect=1", "--logs-specs=default", "--rdzv-conf='timeout=9'", "t")[0].config.launch
    assert (str(launch.tee), str(launch.redirects), launch.rdzv_conf.join_timeout) == ("3", "1", 9.0)


HELP = "; see nvrx-run --help-all"
OTHER = " is not a flag of nvrx-run; torchrun or another version of NVRx has it: leave it out;"
TIMEOUT = "--ft_param_rank_heartbeat_timout"


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--nnode 2 t", "--nnode is not a flag of nvrx-run; did you mean --nnodes?"),
        ("--nproc_per_nod=2 t", "--nproc-per-nod is not a flag of nvrx-run; did you mean --nproc-per-node?"),
        (
            f"{TIMEOUT} 2",
            "--ft-rank-heartbeat-timout is not a flag of nvrx-run; did you mean --ft-rank-heartbeat-timeout?",
        ),
        ("--numa-binding=x", f"--numa-binding{OTHER.partition('leave')[0]}use --numa-bind auto"),
        ("--http-server-port=1 t", f"--http-server-port{OTHER} the launcher has no HTTP server"),
        (
            "--ft-use_infra_group_rank 1 t",
            f"--ft-use-infra-group-rank{OTHER} a node keeps its group rank in all cycles",
        ),
        ("--zzzzzzzz t", f"--zzzzzzzz is not a flag of nvrx-run{HELP} (the script's own flags go after it)"),
        ("--nnodes", f"Option '--nnodes' requires an argument{HELP}"),
        ("--standalone=1 t", f"Option '--standalone' does not take a value{HELP}"),
        ("", f"no training script was given; write it after the flags, as in nvrx-run train.py{HELP}"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence):
    assert refused(*words.split()) == sentence


def test_exit_codes():
    assert run("fails")[0].exit_code == 94
    result, _ = run("refused")
    assert (result.exit_code, result.output) == (93, "nvrx-run: no way\n")


def test_help_has_groups_and_every_built_flag():
    text = run("--help-all")[0].output
    short = run("--help")[0].output
    assert short == run("-h")[0].output and "--help-all" in short and len(short.splitlines()) < 80
    assert {SETTINGS[key].flags[0] for key in USUAL} <= set(short.split()) and "--ft-segment" not in short
    assert "Start training." in text
    for group in {item.group for item in SETTINGS.values()}:
        assert f"\n{group}:\n" in text
    listed = {word for line in text.splitlines() if line.startswith("  -") for word in line.replace(",", " ").split()}
    assert {item.flags[0] for item in SETTINGS.values() if item.flags} <= listed
    assert max(map(len, text.splitlines())) <= 80


def test_print_config_and_version():
    words = ("--print-config", "--nnodes", "2", "--monitor-interval", "9")
    result, calls = run(*words, env={"NVRX_FT_LOG_LEVEL": "debug"})
    assert (result.exit_code, calls) == (0, [])
    rows = {line.split()[0]: line.split()[1:] for line in result.output.splitlines()}
    assert rows["nnodes"] == ["2:2", "--nnodes"]
    assert rows["ft_log_level"] == ["DEBUG", "environment", "NVRX_FT_LOG_LEVEL"]
    assert rows["max_restarts"] == ["0", "default"]
    assert "note: --monitor-interval has no effect" in result.output
    assert len(print_config(resolve({}, {})).splitlines()) == 1 + len(SETTINGS)
    assert run("--version")[0].output.startswith("nvrx_slurm ")


def test_document_is_up_to_date():
    document = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert document == configdoc.render(), "run python scripts/lib/configdoc.py docs/reference/configuration.md"
    for item in SETTINGS.values():
        assert all(name in document for name in (*item.flags, *item.env))
