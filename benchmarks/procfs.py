"""What /proc says about processes: children, memory, context switches."""

import os
from pathlib import Path

from nvrx_slurm.child.descendants import children


def family(pid):
    """`pid` and all its descendants."""
    members, todo = set(), [pid]
    while todo:
        one = todo.pop()
        if one not in members:
            members.add(one)
            todo += children(one)
    return members


def cpu_s(pid):
    """Processor time that it has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mb(pids):
    """Sum of the proportional set sizes in MB (1e6 bytes)."""
    total_kb = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total_kb += int(line.split()[1])
    return total_kb * 1024 / 1e6


def alone_mb(pids):
    """Upper bound of what these processes would need without any others to share pages with (1e6 bytes).

    Of mapped files the private pages, and each file once with the most that any of these processes shares of it;
    of other memory (shared only where they forked from each other) the proportional size.
    """
    own_kb, shared_kb = 0, {}
    for pid in pids:
        file = None
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):  # "from-to perms offset dev inode path": each segment of a file by itself
                file = (words[5], words[2]) if len(words) > 5 and words[4] != "0" else None
            elif words[0] in (("Private_Clean:", "Private_Dirty:") if file else ("Pss:",)):
                own_kb += int(words[1])
            elif file and words[0] in ("Shared_Clean:", "Shared_Dirty:"):
                shared_kb[file] = max(shared_kb.get(file, 0), int(words[1]))
    return (own_kb + sum(shared_kb.values())) * 1024 / 1e6


def private_mb(pid):
    """Memory in MB (1e6 bytes) that would be free if this process ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def processor_s(pids):
    """Seconds that all threads of these processes have run so far, counted by the scheduler in nanoseconds."""
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def switches(pids):
    """Context switches so far, voluntary and not, of all threads: each is one time that a thread was woken."""
    total = 0
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if "ctxt_switches:" in line:
                    total += int(line.split()[1])
    return total


def machine():
    """What the figures were measured on."""
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "?")
    memory_kb = int(next(x for x in _lines("/proc/meminfo") if x.startswith("MemTotal")).split()[1])
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_kb * 1024 / 1e9, 1),
        "kernel": os.uname().release,
        "load": os.getloadavg(),
    }


def _lines(path):
    return Path(path).read_text().splitlines()
