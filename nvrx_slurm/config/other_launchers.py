"""Flags of torchrun and of NVRx's ft_launcher, in some version, that this package has not."""

from __future__ import annotations

_NO_FACT = "leave it out; the check kernel-log of the Slurm hooks reads XIDs, and nvrx why names the node that failed"
_INSTEAD = {  # how the flag begins, without dashes -> what to do
    ("http-server-port", "no-http-server"): "leave it out; the launcher has no HTTP server",
    ("ft-use-infra-group-rank",): "leave it out; a node keeps its group rank in all cycles",
    (
        "ft-attribution-compute-timeout",
    ): "leave it out; an analysis by a language model takes at most 60 s",
    ("ft-cycle-info-job-id",): "leave it out; the file has the id of the Slurm job",
    (
        "ft-segment-health-check",
    ): "leave it out; each node is checked before it joins, see --ft-node-health-checks",
    ("ft-fact-", "ft-health-log", "ft-enable-health-log-", "ft-enable-fact-"): _NO_FACT,
    ("event-log-handler",): "leave it out; events are in events/*.jsonl below --log-dir",
    (
        "duplicate-stdout-",
        "duplicate-stderr-",
    ): "leave it out; search the files of the ranks below --log-dir",
    ("numa-binding",): "use --numa-bind auto",
    ("signals-to-handle",): "leave it out; SIGTERM, SIGINT, SIGHUP and SIGQUIT end the job",
    ("shutdown-timeout",): "use --workers-stop-timeout and --term-timeout",
    ("virtual-local-rank",): "leave it out, and select the device by LOCAL_RANK in the script",
}


def instead(name: str) -> str:
    """ "; another launcher ..." with what to do without the flag `name` (no dashes before it); "" if none has it."""
    found = (
        advice for begins, advice in _INSTEAD.items() if name.replace("_", "-").startswith(begins)
    )
    return next((f"; torchrun or another version of NVRx has it: {advice}" for advice in found), "")
