"""nvidia-resiliency-ext 0.4.1 in a virtual environment of its own, with the torch of ours."""

import subprocess
import sys
import sysconfig
from pathlib import Path

_VERSION = "0.4.1"
_PACKAGES = ["defusedxml", "nvidia-ml-py>=12.570.86", "packaging", "psutil>=6", "pynvml>=12", "pyyaml"]
_TIMEOUT_S = 300.0


def make_venv(parent):
    """The environment, made if it is not there; None, with a sentence, where it cannot be installed.

    Our site-packages come last on its path (for torch); it must not find our launcher under NVRx's name.
    """
    venv = parent / f"venv-nvrx-{_VERSION}"
    launcher = venv / "bin" / "ft_launcher"
    if launcher.exists():
        return venv
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    steps = [
        [sys.executable, "-m", "venv", str(venv)],
        [*pip, "--no-deps", f"nvidia-resiliency-ext=={_VERSION}"],
        [*pip, *_PACKAGES],
    ]
    try:
        for step in steps:
            subprocess.run(step, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"NVRx {_VERSION} cannot be installed and is left out: {error}")
        return None
    ours = sysconfig.get_path("purelib")
    theirs = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        timeout=_TIMEOUT_S,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(theirs) / "torch-of-the-other.pth").write_text(ours + "\n")
    return venv
