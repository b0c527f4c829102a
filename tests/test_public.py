"""Public names change only with a line in the changelog."""

import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import publicnames
import pytest
import release

pytestmark = pytest.mark.fast

REPO = Path(__file__).resolve().parents[1]
RELEASED = (REPO / "tests/data/public.txt").read_text().splitlines()


def test_each_change_of_a_public_name_is_in_the_changelog():
    pytest.importorskip("torch")  # that inprocess imports
    assert publicnames.unsaid(RELEASED, (REPO / "CHANGELOG.md").read_text()) == []


@pytest.mark.parametrize(
    ("file", "title", "end"),
    [
        ("result.json", "\n## result.json\n", "\n## "), ("status.json", "\n## status.json\n", "\n## "),
        ("nvrx-why", "\n| key of `nvrx why --json` |", "\n\n"),
        ("nvrx-goodput", "\n| key of `nvrx goodput --json` |", "\n\n"),
    ],
)  # fmt: skip
def test_the_page_names_each_key_of_a_file(file, title, end):
    page = (REPO / "docs/reference/logs-and-events.md").read_text()
    section = page.partition(title)[2].partition(end)[0]
    firsts = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {f"json {key} {file}" for first in firsts for key in re.findall(r"`(\w+)`", first)}
    assert named == {key for key in publicnames.json_keys() if key.endswith(f" {file}")}


def test_an_entry_of_the_changelog_has_two_lines():
    assert list(release.faults_of_the_changelog((REPO / "CHANGELOG.md").read_text())) == []
    long = "# C\n\n## [Unreleased]\n\n- one\n  two\n  three\n- four\n"
    assert len(list(release.faults_of_the_changelog(long))) == 1


def test_what_a_wheel_carries_is_there():
    parser = configparser.ConfigParser()
    parser.read(REPO / "setup.cfg")
    patterns = parser["options.package_data"]["nvrx_slurm"].split()
    assert [one for one in patterns if "/man/" not in one and not list((REPO / "nvrx_slurm").glob(one))] == []
    folders = {one.split("/")[2] for one in patterns if one.startswith("share/docs/") and one.count("/") == 3}
    assert folders == {path.name for path in (REPO / "docs").iterdir() if path.is_dir()}  # no link of a page is dead


def test_a_wheel_has_no_module_that_is_gone(tmp_path):
    """A second install from an updated clone has no module that the update removed."""
    package = tmp_path / "nvrx_slurm"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "1"\n')
    (package / "gone.py").touch()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tmp_path)
    code = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    for place, there in (("first", True), ("second", False)):
        subprocess.run([sys.executable, "-c", code, place], cwd=tmp_path, capture_output=True, check=True)
        (wheel,) = (tmp_path / place).glob("*.whl")
        assert ("nvrx_slurm/gone.py" in zipfile.ZipFile(wheel).namelist()) is there
        (package / "gone.py").unlink(missing_ok=True)


def test_a_name_that_nobody_told_is_noticed():
    pytest.importorskip("torch")
    changed = [*RELEASED[1:], "setting --ft-gone NVRX_FT_GONE"]
    log = "## [Unreleased]\n\n- `{}`\n\n## [0.1.0]\n\n- `--ft-gone` `{}`\n"
    missing = RELEASED[0].split()[1]
    assert publicnames.unsaid(changed, log.format("--ft-gone-too", missing)) == [RELEASED[0], changed[-1]]
    assert publicnames.unsaid(changed, log.format(f"--ft-gone` and `{missing} 3", "")) == []
