"""Questions to Slurm: a big answer of its tools parsed, and pyslurm's first and later answers on a real cluster."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import slurm_builds
from minicluster import MiniCluster

from benchmarks.figures import Figure, repeated
from benchmarks.harness import Failure
from nvrx_slurm.slurm.api import text

REPO = Path(__file__).resolve().parents[1]
_NODES = 1000
_PYSLURM = "26.05"
_LATER = 20
# As scontrol of 25.11 prints it.
_NODE = (
    "NodeName=gpu-{0} Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.13 AvailableFeatures=h "
    "ActiveFeatures=h Gres=gpu:8 NodeAddr=10.0.0.7 NodeHostName=gpu-{0} Port=6818 Version=25.11.7 "
    "OS=Linux 6.1.0-40-amd64 #1 SMP PREEMPT_DYNAMIC Debian 6.1.153-1 RealMemory=2000000 AllocMem=0 FreeMem=1900000 "
    "Sockets=2 Boards=1 State=IDLE+DRAIN ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=a,b "
    "BootTime=2026-11-21T08:29:45 SlurmdStartTime=2026-11-21T08:29:45 LastBusyTime=2026-11-21T08:29:45 "
    "ResumeAfterTime=None CfgTRES=cpu=64,mem=2000000M,billing=64,gres/gpu=8 AllocTRES= CurrentWatts=0 AveWatts=0 "
    "Reason=nvrx:lustre:/sys/fs/lustre/health_check says NOT HEALTHY [root@2026-11-21T08:29:45] Comment=(null)\n"
)
_ASK = f"""
import json, time
from nvrx_slurm.slurm import api
times = []
slurm = None
for _ in range(1 + {_LATER}):
    began = time.perf_counter()
    slurm = slurm or api.connect()[0]
    slurm.nodes()
    times.append(time.perf_counter() - began)
slurm.close()
print(json.dumps([slurm.name, times]))
"""


def _parsed_ms():
    answer = "".join(map(_NODE.format, range(_NODES)))
    began = time.perf_counter()
    if len(text.nodes(answer)) != _NODES:
        raise Failure("nodes are missing")
    return 1000 * (time.perf_counter() - began)


def _pyslurm(which):
    def measure(_, repeats):
        wheel = slurm_builds.pyslurm(_PYSLURM)
        if wheel is None or (reason := MiniCluster.available(_PYSLURM)):
            raise Failure(reason if wheel else f"NVRX_PYSLURM names no pyslurm for Slurm {_PYSLURM}")
        root = Path(tempfile.mkdtemp(prefix="nvrx-bench-"))
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(root / "wheel")
            with MiniCluster(root / "mc", 3, die_with_owner=True, slurm=_PYSLURM) as cluster:
                env = {**os.environ, **cluster.env(), "PYTHONPATH": f"{root}/wheel:{REPO}"}
                env["LD_LIBRARY_PATH"] = f"/opt/slurm-{_PYSLURM}/lib"
                return {"nvrx-run": [which(_times(env)) for _repeat in range(repeats)]}
        finally:
            shutil.rmtree(root)

    return measure


def _times(env):
    """Milliseconds of the first question and of each later one."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=env, stdout=subprocess.PIPE, timeout=60, check=True, text=True
    )
    name, times = json.loads(done.stdout)
    if name != "pyslurm":
        raise Failure(f"Slurm was asked by {name}")
    return [1000 * took for took in times]


FIGURES = [
    Figure("slurm-parse", f"states of {_NODES} nodes: parsed", "ms", 50.0, repeated(_parsed_ms)),
    Figure("slurm-first", "pyslurm: first answer", "ms", 150.0, _pyslurm(lambda times: times[0])),
    Figure("slurm-later", "pyslurm: slowest later answer", "ms", 10.0, _pyslurm(lambda times: max(times[1:]))),
]
