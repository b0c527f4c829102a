"""How this node finds the others: the coordinator's endpoints, the job's token, this node's name and address."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping

from nvrx_slurm.cli.domains import node_domain
from nvrx_slurm.config.layers import Config
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.job import Meeting
from nvrx_slurm.slurm import conf, control
from nvrx_slurm.slurm.env import SlurmContext, array_infra_rank, coordinator_ports
from nvrx_slurm.slurm.munge import Munge
from nvrx_slurm.types import Node, Peer

_CANDIDATES = 32


def meeting(config: Config, slurm: SlurmContext | None, nodes: NodeRange, env: Mapping[str, str]) -> Meeting | None:
    """Where the job's nodes meet and with which token; None for a job of one node that needs no endpoint.

    Asks Slurm at most for one node's address. Raises UsageError where several nodes have no common endpoint.
    """
    endpoint, rdzv_id = config.launch.endpoint, config.launch.rdzv_id
    keepalive = (config.ft.keepalive_interval, config.ft.keepalive_timeout)
    if nodes.max == 1 and (endpoint is None or endpoint[1] == 0):  # HOST:0 is torchrun's way to say: one node
        return None
    if nodes.max == 1 and not config.launch.rdzv_endpoint and _is_ours(config.launch.endpoints[0][0]):
        return None  # as torchrun's static rendezvous: the script may listen on --master-port
    munge_socket = conf.munge_socket(env) if slurm is not None else None
    if slurm is not None and endpoint is None:
        address = control.node_address(slurm.nodes[0])
        key = f"slurm/{slurm.cluster_name}/{slurm.job_id}.{slurm.step_id}/{slurm.restart_count}"
        ports = tuple(coordinator_ports(slurm))
        endpoints = tuple((address, port) for port in ports)
        first = Peer("0", slurm.nodes[0], address, 0)
        others = (Peer(str(rank), name, "", 0) for rank, name in enumerate(slurm.agents[:_CANDIDATES]) if rank)
        return Meeting(key, endpoints, env.get(TOKEN_ENV, ""), keepalive, munge_socket, ports, (first, *others))
    if endpoint is None:
        raise UsageError(
            f"{nodes.max} nodes have to meet somewhere; give all of them the same --rdzv-endpoint HOST:PORT,"
            " with HOST one of them"
        )
    if endpoint[1] == 0:
        raise UsageError(
            f"--rdzv-endpoint {endpoint[0]}:0 is for one node, and this job has {nodes.max}; give a port that all"
            " nodes know, for example HOST:29400"
        )
    token = env.get(TOKEN_ENV, "")
    if not token and not (slurm is not None and Munge.answers(munge_socket)):
        token = hashlib.sha256(f"nvrx/{rdzv_id}".encode()).hexdigest()
    endpoints = config.launch.endpoints
    mine = tuple(one for one in endpoints[1:] if _is_ours(one[0]))
    candidates = tuple(Peer(f"{host}:{port}", host, host, port) for host, port in endpoints)
    return Meeting(f"rdzv/{rdzv_id}", endpoints, token, keepalive, munge_socket, (endpoint[1],), candidates, mine)


def token_note(config: Config, found: Meeting | None, env: Mapping[str, str]) -> str:
    """A sentence about a job without a secret, or "". Only this host reaches an endpoint on loopback."""
    if found is None or not found.token or env.get(TOKEN_ENV):
        return ""
    host, port = found.endpoints[0]
    if _is_loopback(host):
        return ""
    return (
        f"{TOKEN_ENV} is not set: any host that reaches {host}:{port} and guesses --rdzv-id={config.launch.rdzv_id}"
        f" can join; export the same random {TOKEN_ENV} on all nodes"
    )


def may_host(config: Config, slurm: SlurmContext | None, found: Meeting) -> bool:
    """Whether this node is the coordinator. Without Slurm it may be one of several that try; the first wins."""
    launch = config.launch
    if launch.rdzv_conf.is_host is not None:
        return launch.rdzv_conf.is_host
    if slurm is not None:
        return _slurm_rank(config, slurm) == 0
    return launch.node_rank == 0 if launch.node_rank is not None else _is_ours(found.endpoints[0][0])


def node(config: Config, slurm: SlurmContext | None, found: Meeting | None, nproc: int) -> Node:
    """This node, as the coordinator will know it."""
    launch, host = config.launch, socket.gethostname()
    rank, address = launch.node_rank, launch.local_addr or ""
    order: tuple[int, ...] = ()
    endpoint_host = "127.0.0.1" if found is None else found.endpoints[0][0]
    if slurm is not None:
        rank, host, order = _slurm_rank(config, slurm), slurm.nodename or host, slurm.order
        if not address and _addresses(host):
            address = host
        elif not address and (found is None or rank == 0):
            address = endpoint_host
    elif found is None:
        rank, address = rank or 0, address or endpoint_host
    else:
        rank = _group_rank(os.environ) if rank is None else rank
        address = address or (endpoint_host if _is_ours(endpoint_host) else _towards(*found.endpoints[0]))
    name = f"{host}-{rank}" if slurm is None and found is not None else f"{rank}"
    domain = node_domain(config, slurm, os.environ)
    return Node(f"{name}-{secrets.token_hex(4)}", rank, host, address, nproc, order, domain=domain)


def _slurm_rank(config: Config, slurm: SlurmContext) -> int:
    """Infra rank in the step or, where several jobs of an array meet at an endpoint, in the array."""
    return slurm.infra_rank if config.launch.endpoint is None else array_infra_rank(slurm)


def _group_rank(env: Mapping[str, str]) -> int:
    text = env.get("GROUP_RANK", "")
    return int(text) if text.isdecimal() and len(text) < 8 else -1


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_loopback(host: str) -> bool:
    return any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in _addresses(host))


def _is_ours(host: str) -> bool:
    """Whether `host` is this machine: an address that can be bound here."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    return any(_can_bind(address) for address in _addresses(host))


def _towards(host: str, port: int) -> str:
    """The address of this machine that packets to `host` have; "" where it is not known. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True
