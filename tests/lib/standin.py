"""A stand-in of NVML as a shared library, and the file with its state (see standin.c for what can be told)."""

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("standin.c")


def built(directory):
    """Compile libnvidia-ml.so.1 into `directory`, for LD_LIBRARY_PATH. Raises LookupError without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise LookupError("no C compiler for the stand-in of NVML")
    library = directory / "libnvidia-ml.so.1"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return directory


class StandIn:
    """What it says, and how a process gets to see it."""

    def __init__(self, library, state):
        self.state = state
        self.env = {"LD_LIBRARY_PATH": str(library), "NVML_STANDIN": str(state)}
        state.write_text("")

    def say(self, *lines):
        """From now on this is all of its state."""
        new = self.state.with_suffix(".new")
        new.write_text("\n".join([*lines, ""]))
        new.replace(self.state)

    def met(self):
        """Functions that failed or hung as told, in order."""
        file = Path(f"{self.state}.met")
        return file.read_text().split() if file.exists() else []
