"""--nvrx-compat: NVRx's names in workers, however they are started; and the modules that NVRx's users import."""

from sys import executable as PYTHON

import pytest

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
    one = rig.run("--standalone", "--nvrx-compat", *how.split(), CLIENTS, PYTHONPATH=path)
    assert one.wait() == 0 and f"forked {'preload' in how}" in one.text
