"""`scripts/dev/release`: what a release consists of, built into dist/ and tried. Publishes nothing.

Exit code 0: all is there and works; 1: the sentences say what does not.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import manpages
import publicnames

from nvrx_slurm import __version__
from nvrx_slurm.health import bundle

REPO = Path(__file__).resolve().parents[2]
DIST, MAN = REPO / "dist", REPO / "nvrx_slurm/share/man/man1"
ENTRY_LINES, LINE_CHARS = 2, 185
MAX_BUNDLE_BYTES = 2 * 2**20
SMALL = ("click", "msgspec", "pyyaml", "nvidia-ml-py")
BOUND_S = 1800.0
NEWEST = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 0:
    print("torch", torch.__version__, "summed", one.item())
dist.destroy_process_group()
"""


def run(*words):
    """The output of a command. Raises CalledProcessError."""
    print("+", *words, flush=True)
    return subprocess.run(words, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True, timeout=BOUND_S).stdout


def faults_of_the_tree():
    """What is not yet as a release wants it."""
    if changed := run("git", "status", "--porcelain"):
        yield f"the tree has changes:\n{changed}"
    if not re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", _changelog(), re.MULTILINE):
        yield f"CHANGELOG.md has no section '## [{__version__}] - DATE'"


def faults_of_the_changelog(text):
    """Entries of the top section that are too long."""
    top = text.partition("\n## [")[2].partition("\n## [")[0]
    for entry in re.split(r"^- ", top, flags=re.MULTILINE)[1:]:
        lines = entry.partition("\n\n")[0].splitlines()
        if len(lines) > ENTRY_LINES or max(map(len, lines)) > LINE_CHARS:
            yield f"CHANGELOG.md: more than {ENTRY_LINES} lines of {LINE_CHARS}: {lines[0]}"


def _changelog():
    return (REPO / "CHANGELOG.md").read_text()


def build():
    """Make the files of dist/."""
    for old in (DIST, REPO / "build"):
        shutil.rmtree(old, ignore_errors=True)
    MAN.mkdir(parents=True, exist_ok=True)
    for file, text in manpages.pages().items():
        (MAN / file).write_text(text)
    builds = "import setuptools.build_meta as b; b.build_wheel({0!r}); b.build_sdist({0!r})"
    run(sys.executable, "-c", builds.format(str(DIST)))
    bundle.write(str(DIST / f"nvrx-hooks-{__version__}.pyz"))
    run("scripts/docs")
    shutil.make_archive(str(DIST / f"nvrx_slurm-{__version__}-docs"), "gztar", REPO, "site")


def faults_of_the_files():
    """Install the wheel and use it, then the bundle."""
    (wheel,), (pyz,) = DIST.glob("*.whl"), DIST.glob("*.pyz")
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        run(sys.executable, "-m", "venv", place)
        before = {path for path in place.rglob("*") if path.suffix != ".pyc"}
        pip = (place / "bin/pip", "--disable-pip-version-check")
        run(*pip, "install", "-q", *SMALL)
        run(*pip, "install", "-q", "--no-deps", wheel)
        version = run(place / "bin/nvrx", "--version")
        run(place / "bin/nvrx", "list", "--help")
        run(place / "bin/nvrx", "health", "install", place / "hooks")
        if __version__ not in version or not list(place.glob("**/man1/nvrx-run.1")):
            yield f"the wheel is not whole: {version}"
        shutil.rmtree(place / "hooks")
        run(*pip, "uninstall", "-q", "-y", "nvrx_slurm", *SMALL)
        left = [path for path in place.rglob("*") if path not in before and "__pycache__" not in str(path)]
        yield from (f"uninstall leaves {path}" for path in left)
    if __version__ not in run("env", "-i", sys.executable, "-I", "-S", pyz, "--version") or _too_large(pyz):
        yield f"{pyz} is too large or does not work"


def _too_large(path):
    return path.stat().st_size > MAX_BUNDLE_BYTES


def try_newest_torch():
    """A job of two ranks with the newest torch of PyPI, in an environment of its own."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "script.py").write_text(NEWEST)
        run(sys.executable, "-m", "venv", place / "venv")
        run(place / "venv/bin/pip", "install", "-q", "--upgrade", "torch", REPO)
        logs = f"--log-dir={place}/logs"
        print(run(place / "venv/bin/nvrx-run", "--standalone", "--nproc-per-node=2", logs, place / "script.py"))


def main():
    """See the file."""
    if "--torch" in sys.argv:
        try_newest_torch()
        return 0
    tree = list(faults_of_the_tree())
    faults = [*([] if "--trial" in sys.argv else tree), *faults_of_the_changelog(_changelog())]
    faults += [f"not in the changelog: {name}" for name in _unsaid()]
    if not faults:
        build()
        faults += faults_of_the_files()
    if faults:
        print("\n".join(faults))
        return 1
    files = sorted(DIST.iterdir())
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums)
    if "--trial" not in sys.argv:
        (REPO / "tests/data/public.txt").write_text("\n".join(publicnames.names()) + "\n")
    print(sums + "\n".join(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}" for path in files))
    return 0


def _unsaid():
    released = (REPO / "tests/data/public.txt").read_text().splitlines()
    return publicnames.unsaid(released, _changelog())


if __name__ == "__main__":
    sys.exit(main())
