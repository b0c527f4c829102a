"""--nvrx-compat: NVRx's names in workers, however they are started; and the modules that NVRx's users import."""

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from sys import executable as PYTHON

import pytest

from nvrx_slurm import compat

pytestmark = pytest.mark.process


CLIENTS = """
fault_tolerance.rank_monitor_client.RankMonitorClient fault_tolerance.config.FaultToleranceConfig
fault_tolerance.data.RankInfo inprocess.store.TCPStore inprocess.store.BarrierTimeout inprocess.wrap.CallWrapper
inprocess.monitor_process.MonitorProcess inprocess.tools.inject_fault.Fault
"""
ALIAS = """
forked = "decimal" in getattr(sys.meta_path[0], "parked", ())
import importlib
for name in sys.argv[2].split()[: int(sys.argv[1])]:  # the others import torch
    name, _, member = name.rpartition(".")
    ours, theirs = (importlib.import_module(f"{package}.{name}") for package in ("nvrx_slurm", "nvidia_resiliency_ext"))
    assert ours is theirs and ours.__spec__.name == ours.__name__ and hasattr(ours, member)
import nvidia_resiliency_ext.shared_utils.inject_fault as theirs, nvrx_slurm.testing.inject_fault as ours
assert ours is theirs and sys.modules["nvidia_resiliency_ext"].__version__ >= "0.6.0"
import nvidia_resiliency_ext.straggler as old, nvidia_resiliency_ext.attribution.straggler as new
assert old is new is sys.modules["nvrx_slurm.attribution.straggler"]
for name in ("checkpointing.async_ckpt.core", "attribution.client", "agent", "fault_tolerance.launcher"):
    try:
        sys.exit(f"{name}: {importlib.import_module('nvidia_resiliency_ext.' + name)}")
    except ImportError as error:
        assert "fault_tolerance, inprocess" in str(error), error
say("forked", forked)
"""


@pytest.mark.repeats("-m", "--no-python", "a.py")
@pytest.mark.torch
@pytest.mark.parametrize("how", ["a.py 8", "-m a 3", f"--no-python {PYTHON} a.py 3", "--ft-preload=decimal a.py 3"])
def test_workers_get_the_alias_before_an_installed_nvrx(rig, how):
    pytest.importorskip("torch")
    rig.script(ALIAS, "a.py")
    (rig.dir / "site").mkdir()
    (rig.dir / "site" / "nvidia_resiliency_ext.py").write_text("raise RuntimeError('the other')")
    path = f"{rig.dir}/site:{rig.env()['PYTHONPATH']}"
    one = rig.ran("--standalone", "--nvrx-compat", *how.split(), CLIENTS, PYTHONPATH=path)
    assert f"forked {'preload' in how}" in one.text


# An installed NVRx in small: async_ckpt is a namespace package, as in 0.4.1.
INSTALLED = {
    "__init__.py": "raise RuntimeError('the other')",
    "attribution/__init__.py": "Analyzer = 1",
    "attribution/straggler.py": "raise RuntimeError('ours')",
    "checkpointing/__init__.py": "",
    "checkpointing/async_ckpt/core.py": "from ..utils import save",
    "checkpointing/utils.py": "def save(to): to.put(__name__)",
    "fault_tolerance/config.py": "raise RuntimeError('ours')",
    "fault_tolerance/launcher.py": "from .config import FaultToleranceConfig",
    "ptl_resiliency/local.py": "from ..checkpointing import utils",
    "shared_utils/inject_fault.py": "raise RuntimeError('ours')",
    "shared_utils/log_manager.py": "",
}
USES = """
import sys
from importlib.machinery import PathFinder

class Editable:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, [sys.argv[1]]) if name == "nvidia_resiliency_ext" else None

if sys.argv[2] == "editable":
    sys.meta_path.append(Editable())
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import save
if __name__ == "__main__":
    import multiprocessing, pkgutil
    import nvidia_resiliency_ext, nvrx_slurm
    from nvidia_resiliency_ext import checkpointing, fault_tolerance, inprocess
    from nvidia_resiliency_ext.attribution import Analyzer, straggler
    from nvidia_resiliency_ext.fault_tolerance.launcher import FaultToleranceConfig
    from nvidia_resiliency_ext.ptl_resiliency.local import utils
    from nvidia_resiliency_ext.shared_utils import inject_fault, log_manager

    assert utils.save is save and inprocess.__name__ == "nvrx_slurm.inprocess"
    assert FaultToleranceConfig is nvrx_slurm.fault_tolerance.FaultToleranceConfig
    assert straggler is nvrx_slurm.attribution.straggler and inject_fault is nvrx_slurm.testing.inject_fault
    assert "checkpointing" in [one.name for one in pkgutil.iter_modules(nvidia_resiliency_ext.__path__)]
    try:
        from nvidia_resiliency_ext.checkpointing import later
    except ImportError as error:
        assert error.name.startswith("nvidia_resiliency_ext.checkpointing"), error.name
    try:
        import nvidia_resiliency_ext.services
        sys.exit("found")
    except ModuleNotFoundError as error:
        assert "no such module" in str(error), error
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=save, args=(queue,))
    child.start()
    print(queue.get(timeout=60), child.join())
"""


@pytest.mark.parametrize("how", ["plain", "editable"])
def test_modules_that_are_not_ours_come_from_an_installed_nvrx(tmp_path, how):
    pytest.importorskip("torch")
    for name, text in INSTALLED.items():
        path = tmp_path / "site" / "nvidia_resiliency_ext" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "uses.py").write_text(USES)
    site = str(tmp_path / "site")
    path = f"{site}:{Path(compat.__file__).parents[2]}" if how == "plain" else str(Path(compat.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": compat.python_path({"PYTHONPATH": path})}
    command = [PYTHON, "uses.py", site, how]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.split() == ["nvidia_resiliency_ext.checkpointing.utils", "None"], ended.stderr


IMPORTS = """
import nvidia_resiliency_ext.fault_tolerance as ft
    import nvidia_resiliency_ext.inprocess.abort, nvidia_resiliency_ext.straggler
from nvidia_resiliency_ext.inprocess import Wrapper
from nvidia_resiliency_ext import fault_tolerance
from nvidia_resiliency_ext import inprocess as ip, ptl_resiliency
from nvidia_resiliency_ext import straggler
from nvidia_resiliency_ext.straggler import Detector
from nvidia_resiliency_ext.attribution import straggler
import nvidia_resiliency_ext.attribution.straggler as s
from nvidia_resiliency_ext.shared_utils import inject_fault
from nvidia_resiliency_ext.shared_utils.inject_fault import Fault
"""
LEFT = """
from nvidia_resiliency_ext import checkpointing, inprocess
from nvidia_resiliency_ext.checkpointing.async_ckpt import core
import nvidia_resiliency_ext.attribution.trace_analyzer
"""


@pytest.mark.fast
def test_the_command_of_the_page_changes_each_form_of_import(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-from-nvrx.md"
    (tmp_path / "train.py").write_text(IMPORTS + LEFT)
    command = page.read_text().split("```bash\n")[1].partition("grep")[0]
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    changed = (tmp_path / "train.py").read_text().removesuffix(LEFT)
    assert "nvidia" not in changed
    new = {line.strip() for line in changed.splitlines()}
    assert {
        "from nvrx_slurm import inprocess as ip, ptl_resiliency",
        "from nvrx_slurm.testing import inject_fault",
    } < new
    if not find_spec("lightning"):
        new = {line for line in new if "ptl" not in line}
    subprocess.run([PYTHON, "-c", "\n".join(sorted(new))], check=True, timeout=60)
