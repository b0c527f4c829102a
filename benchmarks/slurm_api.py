"""Questions to Slurm: a big answer of its tools parsed."""

import time

from benchmarks.figures import Figure, repeated
from benchmarks.harness import Failure
from nvrx_slurm.slurm.api import text

_NODES = 1000
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


def _parsed_ms():
    answer = "".join(map(_NODE.format, range(_NODES)))
    began = time.perf_counter()
    if len(text.nodes(answer)) != _NODES:
        raise Failure("nodes are missing")
    return 1000 * (time.perf_counter() - began)


FIGURES = [
    Figure("slurm-parse", f"states of {_NODES} nodes: parsed", "ms", 50.0, repeated(_parsed_ms)),
]
