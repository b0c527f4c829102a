"""Every flag of attribution: what is taken, what the process is told, and one sentence for what is not taken."""

import os
from pathlib import Path

import pytest

from nvrx_slurm.attribution.records import read_key
from nvrx_slurm.cli.here import Here, StartPlace
from nvrx_slurm.cli.job_logs import attribution_spec
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.ft_logs import ENDPOINT, URL
from nvrx_slurm.config.layers import Config, Resolved
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.output.logs import LogSpec
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.control import Control

pytestmark = pytest.mark.fast


MODEL = {"attribution_llm_base_url": "https://h/v1", "attribution_llm_model": "m"}
LOCAL = {"attribution_endpoint": "localhost"}
TAKEN = ("localhost", "http://h:8000", "http://[::1]:8000", "unix:///run/x.sock", "grpc://h:50051")
NONE = (
    (ENDPOINT, ["", "h", "h:80", "http://h", "http://:80", "http://h:0", "ftp://h:1", "http://h:80/x", "http://h:80?a=b",
                "http://u:p@h:80", "unix://x", "http://h h:80", "http://h:80\n", 7, "http://[::1:80", "x" * 5000]),
    (URL, ["x", "http://", "https://h/?q", "https://h/#f", "unix:///x", "https://u:p@h/"]),
)  # fmt: skip


def test_endpoints_and_urls():
    for text in TAKEN:
        assert ENDPOINT.parse(text) == text
    assert ENDPOINT.parse("https://h.example:443/") == "https://h.example:443" and URL.parse("https://h/v1")
    for kind, texts in NONE:
        for text in texts:
            with pytest.raises(ValueError, match="must "):
                kind.parse(text)
                pytest.fail(f"{text!r} was taken")


def config(prefix="/x/train.log", **given):
    return Config(ft=FaultToleranceConfig(per_cycle_applog_prefix=prefix, **given))


def spec_of(one, env, tree, hosts=True):
    here = Here(Resolved(one, {}), env, StartPlace.ALONE, None, Control())
    return attribution_spec(here, RunDir(tree, "7", "r0"), LogSpec(one.ft.per_cycle_applog_prefix or ""), hosts)


@pytest.mark.parametrize(
    "given, word",
    [
        ({**LOCAL, "prefix": None}, "--ft-per-cycle-applog-prefix"),
        ({"attribution_endpoint": "unix:///s", "attribution_export_url": "https://h/x"}, "endpoint localhost"),
        ({"attribution_endpoint": "http://h:1", **MODEL}, "--ft-attribution-endpoint localhost"),
        ({**LOCAL, "attribution_llm_api_key_file": "/k"}, "give both"),
        ({**LOCAL, **MODEL, "attribution_llm_base_url": "http://h/v1"}, "unencrypted"),
    ],
)
def test_settings_that_contradict_each_other(given, word):
    with pytest.raises(UsageError, match=word):
        config(**given)


def test_a_model_on_this_machine_may_be_asked_in_the_clear():
    for url in ("http://127.0.0.1:1/v1", "http://localhost/v1", "http://[::1]/v1"):
        config(**LOCAL | MODEL | {"attribution_llm_base_url": url})
    config(**LOCAL | MODEL | {"attribution_llm_base_url": "http://h", "attribution_llm_plain_http": 1})


def test_grpc_is_taken_and_said_to_do_nothing():
    one = config(attribution_endpoint="grpc://h:1")
    assert not one.ft.attribution_service and "has no effect" in one.ft.attribution_note
    assert spec_of(one, {}, Path("/t")) is None
    assert config(attribution_endpoint="http://h:1").ft.attribution_note == "" == config().ft.attribution_note
    assert "has no effect" in config(attribution_export_url="https://h/x").ft.attribution_note


def test_what_the_process_is_told(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    env = {"USER": "u", "SLURM_JOB_USER": "su", "SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "NVRX_TOKEN": "t" * 64}
    one = config(f"{tmp_path}/link/a.log", **LOCAL)
    spec = spec_of(one, env, tmp_path / "tree")
    assert spec.prefix == f"{tmp_path}/real/a.log"
    assert (spec.user, spec.job_id) == ("su", "7") and "t" * 64 not in repr(spec)
    spec = spec_of(one, {}, tmp_path)
    assert (spec.user, spec.job_id) == ("", "")


@pytest.mark.parametrize(
    "mode, content, word", [(0o640, "k", "chmod 600"), (0o600, "", "must hold the key"), (0o600, "a b", "key")]
)
def test_a_key_file_that_cannot_be_used_ends_the_start(tmp_path, mode, content, word):
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    one = config(**LOCAL | MODEL, attribution_llm_api_key_file=str(path))
    with pytest.raises(UsageError, match=word):
        spec_of(one, {}, tmp_path)
    assert spec_of(one, {}, tmp_path, False) is not None  # another node begins as the coordinator


def test_the_key_file_of_the_environment(tmp_path):
    one = config(**LOCAL | MODEL)
    for env in ({}, {"LLM_API_KEY_FILE": f"{tmp_path}/none"}, {"LLM_API_KEY_FILE": str(tmp_path)}):
        with pytest.raises(UsageError, match="LLM_API_KEY_FILE"):
            spec_of(one, env, tmp_path)
    (tmp_path / "key").write_text("sk-1\n")
    os.chmod(tmp_path / "key", 0o400)
    spec = spec_of(one, {"LLM_API_KEY_FILE": f"{tmp_path}/key"}, tmp_path)
    assert spec.llm_key_file == f"{tmp_path}/key" and "sk-1" not in repr(spec)
    os.mkfifo(tmp_path / "pipe", 0o600)  # which never answers
    with pytest.raises(OSError, match="no regular file"):
        read_key(f"{tmp_path}/pipe")


def test_a_service_elsewhere_needs_httpx_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"http://h:1: .*httpx.* pip install 'nvrx_slurm\[attribution\]'"):
        spec_of(config(attribution_endpoint="http://h:1"), {}, tmp_path)
    assert spec_of(config(**LOCAL), {}, tmp_path) is not None
