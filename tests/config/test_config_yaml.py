"""The YAML file: found at any depth, checked whole, and every mistake is one sentence with file and key."""

import signal

import pytest

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.layers import resolve
from nvrx_slurm.errors import UsageError

pytestmark = pytest.mark.fast


def write(tmp_path, content):
    path = tmp_path / "ft.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def ft_of(path, **flags):
    return resolve({"ft_cfg_path": path, **flags}, {}).config.ft


@pytest.mark.parametrize(
    "content",
    [
        "fault_tolerance:\n  rank_heartbeat_timeout: 60\n",
        "\ufefffault_tolerance: {rank_heartbeat_timeout: 60.0}\n",
        "a:\n  b:\n  - c: 1\n  - fault_tolerance: {rank_heartbeat_timeout: '60'}\n",
        "base: &x {rank_heartbeat_timeout: 60}\nfault_tolerance:\n  <<: *x\n  log_level: INFO\n",
        "a: &x\n  fault_tolerance: {rank_heartbeat_timeout: 60}\nb: *x\n",
        "a: &x [*x, {fault_tolerance: {rank_heartbeat_timeout: 6e1}}]\n",
    ],
)
def test_section_at_any_depth(tmp_path, content):
    assert ft_of(write(tmp_path, content)).rank_heartbeat_timeout == 60.0


def test_types_of_yaml(tmp_path):
    content = "rank_termination_signal: 10, log_level: dbg, initial_rank_heartbeat_timeout: null"
    ft = ft_of(write(tmp_path, section(content)))
    assert ft_of(write(tmp_path, "fault_tolerance:\n")) == FaultToleranceConfig()
    assert (ft.rank_termination_signal, ft.log_level, ft.initial_rank_heartbeat_timeout) == (signal.SIGUSR1, 10, None)


def section(text):
    return f"fault_tolerance: {{{text}}}"


# content, what the sentence has
BAD_FILES = [
    (section("rank_heartbeat_timout: 3"), "rank_heartbeat_timout is not .* did you mean rank_heartbeat_timeout"),
    (section("zzzzzz: 3"), "fault_tolerance.zzzzzz is not a known key; remove it"),
    (section("health_logging: {prefix: /a}"), "health_logging is not a known key; torchrun or another version"),
    ("a: {fault_tolerance: {rank_heartbeat_timeout: true}}", "a.fault_tolerance.rank_heartbeat_timeout = True: "),
    (section("log_level: [1]"), r"log_level = \[1\]: must be"),
    ("x: 1", "no fault_tolerance: section"),
    ("a: {fault_tolerance: {}}\nb: {fault_tolerance: {}}", "has 2 fault_tolerance: sections"),
    ("fault_tolerance: {}\nx: 1\nfault_tolerance: {}", "line 3 column 1: .* fault_tolerance is there twice"),
    ("fault_tolerance:\n  log_level: INFO\n  log_level: DEBUG\n", "line 3 column 3: .* log_level is there twice"),
    ("fault_tolerance: [1]", "fault_tolerance must be a mapping"),
    ("fault_tolerance:\n\tlog_level: INFO\n", "line 2 column 1: .*; use spaces"),
    ("fault_tolerance: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ("a: 1\n---\nb: 2\n", "not valid YAML"),
    (b"a: \x00\n", "not valid YAML"),
    (b"a: \xff\n", "not UTF-8 text .byte 3."),
    ("[" * 100_000, "not valid YAML"),
    (b"#" * 300_000, "larger than 256 KiB"),
]


@pytest.mark.parametrize("content, sentence", BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_file_is_one_sentence(tmp_path, content, sentence):
    path = write(tmp_path, content)
    with pytest.raises(UsageError, match=sentence) as caught:
        ft_of(path)
    sentence = str(caught.value)
    assert sentence.startswith(path) and "\n" not in sentence and len(sentence) < 400 + len(path)


def test_a_billion_laughs_are_looked_at_once(tmp_path):
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    assert ft_of(write(tmp_path, "\n".join([*lines, "fault_tolerance: {log_level: DEBUG}"]))).log_level == 10


def test_every_value_of_the_file_is_checked_even_when_a_flag_wins(tmp_path):
    path = write(tmp_path, "fault_tolerance: {log_level: LOUD}")
    with pytest.raises(UsageError, match="LOUD"):
        ft_of(path, ft_log_level="INFO")


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(UsageError, match="gone.yaml does not exist; correct --ft-cfg-path or remove it"):
        ft_of(str(tmp_path / "gone.yaml"))
    with pytest.raises(UsageError, match="cannot be read .Is a directory."):
        ft_of(str(tmp_path))
    with pytest.raises(UsageError, match="must be a path"):
        ft_of("a\0b")


@pytest.mark.parametrize("there", [True, False])
def test_ignore_missing_cfg_forgives_no_file_and_no_section_only(tmp_path, there):
    path = write(tmp_path, "x: 1") if there else str(tmp_path / "gone.yaml")
    resolved = resolve({"ft_cfg_path": path, "ft_ignore_missing_cfg": True}, {})
    assert resolved.config.ft == FaultToleranceConfig()
    assert path in resolved.notes[0]
    with pytest.raises(UsageError, match="not a known key"):
        ft_of(write(tmp_path, "fault_tolerance: {x: 1}"), ft_ignore_missing_cfg=True)


def test_from_yaml_file_and_back(tmp_path):
    values = {"rank_heartbeat_timeout": 7, "rank_termination_signal": "SIGUSR2", "log_level": "DEBUG"}
    values |= {"rank_section_timeouts": {"step": 5, "setup": None}, "storage_healthcheck_path": ["/a", "/b"]}
    config = FaultToleranceConfig(**values)
    path = tmp_path / "out.yaml"
    config.to_yaml_file(path)
    assert FaultToleranceConfig.from_yaml_file(path) == config
    FaultToleranceConfig().to_yaml_file(path)
    assert FaultToleranceConfig.from_yaml_file(path) == ft_of(str(path)) == FaultToleranceConfig()


def test_from_kwargs():
    assert FaultToleranceConfig.from_kwargs(safety_factor="3").safety_factor == 3.0
    assert FaultToleranceConfig.from_kwargs(ignore_not_recognized=True, nope=1) == FaultToleranceConfig()
    with pytest.raises(UsageError, match="safety_facto is not a field .* did you mean safety_factor"):
        FaultToleranceConfig.from_kwargs(safety_facto=3)
    with pytest.raises(UsageError, match="FaultToleranceConfig: segment=0 must be a whole number >= 1|from 1"):
        FaultToleranceConfig(segment=0)


def test_fields_are_assigned_as_in_nvrx():
    config = FaultToleranceConfig()
    config.rank_heartbeat_timeout = "5"  # type: ignore[assignment]
    assert config == FaultToleranceConfig(rank_heartbeat_timeout=5.0)
    for name, value, expected in (("segment", 0, "segment=0 must be"), ("rank_heartbeat_timout", 5, "did you mean")):
        with pytest.raises(UsageError, match=expected):
            setattr(config, name, value)
