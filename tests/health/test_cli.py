"""`nvrx health` as people use it, and the program that hooks and the agent start."""

import json
import re

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main
from nvrx_slurm.health.check import CheckFinding, Verdict
from nvrx_slurm.health.outcome import Report, from_json

pytestmark = pytest.mark.process


def nvrx(dgx, command, *args):
    return CliRunner().invoke(main, ["health", command, "--sysroot", str(dgx.root), *args])


def test_run_shows_a_table_with_failures_first(dgx):
    dgx.write("/sys/fs/lustre/health_check", "NOT HEALTHY\n")
    site = dgx.site(checks={"cpu-count": {"on_fail": "warn"}}, expect={"cpus": 1})
    found = nvrx(dgx, "run", "--node", "dgx07", "--config", site)
    assert found.exit_code == 1
    lines = found.stdout.splitlines()
    assert lines[0].split() == [*["FAIL", "lustre"], *lines[0].split()[2:]]
    assert lines[0].endswith("[drain]")
    assert lines[1].startswith("WARN") and "cpu-count" in lines[1]
    assert "storage-paths" not in found.stdout
    assert lines[-1].startswith("dgx07: fail in ") and ": 1 fail, 1 warn, " in lines[-1]
    assert "storage-paths" in nvrx(dgx, "run", "--all").stdout


@pytest.mark.parametrize(
    "args, code",
    [
        ((), 0),
        (("--when", "preflight"), 0),
        (("--only", "cpu-count", "--expect", "cpus=1"), 1),
        (("--only", "nothing"), 2),
        (("--sysroot", "/nowhere"), 2),
    ],
)
def test_exit_codes(dgx, args, code):
    assert nvrx(dgx, "run", *args).exit_code == code
    process = dgx.start(*args)
    process.communicate(timeout=60)
    assert process.returncode == code


def test_unknown_is_3_unless_the_site_wants_more(dgx):
    dgx.write("/proc/meminfo", "junk")
    assert nvrx(dgx, "run").exit_code == 3
    site = dgx.site(checks={"memory-size": {"on_unknown": "fail"}})
    assert nvrx(dgx, "run", "--config", site).exit_code == 1


def test_json_is_one_line_for_machines(dgx):
    found = nvrx(dgx, "run", "--json", "--when", "prolog")
    plain = json.loads(found.stdout)
    assert plain["verdict"] == "pass" and plain["when"] == "prolog"
    assert set(plain["findings"][0]) == {"check", "verdict", "text", "seconds", "action"}
    assert from_json(found.stdout).exit_code == 0


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", '{"findings": [{"verdict": "well"}]}', "[" * 200_000],
    ids=range(5),
)
def test_a_report_that_is_none_is_refused(line):
    with pytest.raises(ValueError, match="not a health report"):
        from_json(line)


def test_a_report_survives_json():
    report = Report("n1", "preflight", [CheckFinding("a", Verdict.UNKNOWN, "x", 0.1, "drain")], ["note"], 0.2)
    assert from_json(report.as_json()) == report


def test_list_and_explain_tell_what_holds_on_this_node(dgx):
    site = dgx.site(checks={"mounts": {"when": ["preflight"], "budget": 1.5}}, expect={"mounts": ["/home"]})
    where = ("--config", site, "--node", "dgx07")
    text = nvrx(dgx, "list", *where).stdout
    assert "mounts  (1.5 s; preflight)" in text and "kernel-log" in text and "root)" in text
    explained = nvrx(dgx, "explain", "mounts", *where).stdout
    assert re.search(r"^mounts +/home  \(mount targets", explained, re.M)
    listed = {one["name"]: one for one in json.loads(nvrx(dgx, "list", "--json", *where).stdout)}
    plain = json.loads(nvrx(dgx, "explain", "mounts", "--json", *where).stdout)
    assert plain == {"node": "dgx07", **listed["mounts"]}
    told = {key: plain[key] for key in ("contexts", "lane", "budget_s", "needs_root", "on_fail")}
    assert told == {
        "contexts": ["preflight"], "lane": None, "budget_s": 1.5, "needs_root": False, "on_fail": "drain",
    }  # fmt: skip
    assert plain["expects"]["mounts"] == ["/home"] and listed["gpu-ecc"]["lane"] == "NVML"
    wrong = nvrx(dgx, "explain", "mount")
    assert wrong.exit_code == 2 and "there is no check 'mount'; did you mean mounts?" in wrong.stderr


def test_init_writes_a_file_that_this_node_passes_and_a_worse_one_fails(dgx, tmp_path):
    file = tmp_path / "site.yaml"
    assert nvrx(dgx, "init", "--node", "dgx07", "--output", str(file)).exit_code == 0
    assert nvrx(dgx, "run", "--node", "dgx07", "--config", str(file)).exit_code == 0
    explained = nvrx(dgx, "explain", "mounts", "--node", "dgx07", "--config", str(file)).stdout
    assert "/lustre/fs0, /home, /mnt/data sets" in explained
    mountinfo = (dgx / "/proc/self/mountinfo").read_text()
    dgx.write("/proc/self/mountinfo", "\n".join(line for line in mountinfo.splitlines() if "nfs4" not in line))
    dgx.edit("/proc/meminfo", "2113530296", "1981434653")
    dgx.write("/sys/devices/system/cpu/online", "0-222\n")
    found = nvrx(dgx, "run", "--node", "dgx07", "--config", str(file))
    assert found.exit_code == 1
    failed = {line.split()[1] for line in found.stdout.splitlines() if line.startswith("FAIL")}
    assert failed == {"mounts", "memory-size", "cpu-count"}
    again = nvrx(dgx, "init", "--output", str(file))
    assert (again.exit_code, "File exists" in again.stderr) == (2, True)
    assert nvrx(dgx, "init", "--node", "a[1-2]").exit_code == 2


def test_ack_ends_what_was_repaired(dgx):
    with (dgx / "/dev/kmsg").open("a") as log:
        log.write("4,3000,8211000001,-;NVRM: Xid (PCI:0000:52:00): 79, GPU has fallen off the bus.\n")
    assert nvrx(dgx, "run", "--only", "kernel-log").exit_code == 1
    assert nvrx(dgx, "run", "--only", "kernel-log").exit_code == 1, "looking must not make it well"
    assert nvrx(dgx, "ack").stdout == "2 XIDs and SXIDs are acknowledged\n"
    assert nvrx(dgx, "run", "--only", "kernel-log").exit_code == 0
    with (dgx / "/dev/kmsg").open("a") as log:
        log.write("4,3001,8311000001,-;NVRM: Xid (PCI:0000:52:00): 79, GPU has fallen off the bus.\n")
    assert nvrx(dgx, "run", "--only", "kernel-log").exit_code == 1
    dgx.write("/proc/sys/kernel/random/boot_id", "another\n")
    (dgx / "/dev/kmsg").write_text("4,30,1,-;NVRM: Xid (PCI:0000:52:00): 48, DBE\n")
    assert nvrx(dgx, "run", "--only", "kernel-log").exit_code == 1, "another boot counts anew"
