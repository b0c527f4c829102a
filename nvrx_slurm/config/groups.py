"""Headings under which --help and docs/reference/configuration.md list the settings, in their order."""

from __future__ import annotations

NODES = "Nodes and workers"
SLURM = "Slurm"
RENDEZVOUS = "Rendezvous"
RESTARTS = "Restarts and stopping"
MONITORING = "Rank monitoring"
LOGS = "Logs"
CONFIGURATION = "Configuration and dry runs"
HEALTH = "Health checks"
DEVICES = "GPUs and NUMA"
LOG_SERVER = "Log aggregation"
ATTRIBUTION = "Attribution"
JOB = "The job"
CONTAINER = "Container"
CHAIN = "Chains and waiting"

GROUPS = (NODES, SLURM, RENDEZVOUS, RESTARTS, MONITORING, HEALTH, DEVICES, LOGS, LOG_SERVER, ATTRIBUTION, CONFIGURATION)
GROUPS_SUBMIT = (JOB, CONTAINER, CHAIN)
