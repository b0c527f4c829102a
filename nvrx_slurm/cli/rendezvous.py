"""How this node finds the others: the coordinator's endpoints, the job's token, this node's name and address."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Mapping

from nvrx_slurm.cli.here import Here
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.job import Meeting
from nvrx_slurm.slurm import conf
from nvrx_slurm.slurm.env import SlurmContext, coordinator_ports
from nvrx_slurm.slurm.munge import Munge
from nvrx_slurm.system.hardware import Absent, HardwareError
from nvrx_slurm.types import Node, Peer

_CANDIDATES = 32


def meeting(here: Here, nodes: NodeRange) -> Meeting | None:
    """Where the job's nodes meet and with which token; None for a job of one node that needs no endpoint.

    Asks Slurm at most for one node's address. Raises UsageError where several nodes have no common endpoint.
    """
    endpoint = here.launch.endpoint
    slurm = here.slurm
    # HOST:0 is torchrun's way to say: one node
    if nodes.max == 1 and (endpoint is None or endpoint[1] == 0):
        return None
    if nodes.max == 1 and not here.launch.rdzv_endpoint and _is_ours(here.launch.endpoints[0][0]):
        return None  # as torchrun's static rendezvous: the script may listen on --master-port
    if slurm is not None and endpoint is None:
        return _in_slurm(here, slurm)
    if endpoint is None or endpoint[1] == 0:
        raise UsageError(
            f"{nodes.max} nodes have to meet somewhere; give all of them the same --rdzv-endpoint HOST:PORT,"
            " with HOST one of them and a port such as 29400"
        )
    return _at_endpoints(here, here.launch.endpoints)


def _in_slurm(here: Here, slurm: SlurmContext) -> Meeting:
    address, ports = here.control.node_address(slurm.nodes[0]), tuple(coordinator_ports(slurm))
    others = (
        Peer(str(rank), name, "", 0) for rank, name in enumerate(slurm.agents[:_CANDIDATES]) if rank
    )
    return Meeting(
        key=f"slurm/{slurm.cluster_name}/{slurm.job_id}.{slurm.step_id}/{slurm.restart_count}",
        endpoints=tuple((address, port) for port in ports),
        token=here.env.get(TOKEN_ENV, ""),
        keepalive=(here.ft.keepalive_interval, here.ft.keepalive_timeout),
        munge_socket=conf.munge_socket(here.env),
        ports=ports,
        candidates=(Peer("0", slurm.nodes[0], address, 0), *others),
        control=here.control,
    )


def _at_endpoints(here: Here, endpoints: tuple[tuple[str, int], ...]) -> Meeting:
    """At --rdzv-endpoint. Without a token, MUNGE or the name of the job lets nodes in."""
    munge_socket = conf.munge_socket(here.env) if here.slurm is not None else None
    token = here.env.get(TOKEN_ENV, "")
    rdzv_id = here.launch.rdzv_id
    if not token and not (here.slurm is not None and Munge.answers(munge_socket)):
        token = hashlib.sha256(f"nvrx/{rdzv_id}".encode()).hexdigest()
    return Meeting(
        key=f"rdzv/{rdzv_id}",
        endpoints=endpoints,
        token=token,
        keepalive=(here.ft.keepalive_interval, here.ft.keepalive_timeout),
        munge_socket=munge_socket,
        ports=(endpoints[0][1],),
        candidates=tuple(Peer(f"{host}:{port}", host, host, port) for host, port in endpoints),
        mine=tuple(one for one in endpoints[1:] if _is_ours(one[0])),
        control=here.control,
    )


def token_note(here: Here, found: Meeting | None) -> str:
    """A sentence about a job without a secret, or "". Only this host reaches an endpoint on loopback."""
    if found is None or not found.token or here.env.get(TOKEN_ENV):
        return ""
    host, port = found.endpoints[0]
    if host == "localhost" or host.startswith(("127.", "::1")):
        return ""
    return (
        f"{TOKEN_ENV} is not set: any host that reaches {host}:{port} and guesses --rdzv-id={here.launch.rdzv_id}"
        f" can join; export the same random {TOKEN_ENV} on all nodes"
    )


def may_host(here: Here, found: Meeting) -> bool:
    """Whether this node is the coordinator. Without a rank it may be one of several that try; the first wins."""
    is_host = here.launch.rdzv_conf.is_host
    if is_host is not None:
        return is_host
    rank = here.rank
    return rank == 0 if rank is not None else _is_ours(found.endpoints[0][0])


def node(here: Here, found: Meeting | None, nproc: int) -> Node:
    """This node, as the coordinator will know it."""
    launch = here.launch
    slurm = here.slurm
    host = socket.gethostname()
    rank = here.rank
    address = launch.local_addr or ""
    order: tuple[int, ...] = ()
    endpoint_host = "127.0.0.1" if found is None else found.endpoints[0][0]
    if slurm is not None:
        host = slurm.nodename or host
        order = slurm.order
        if not address and _addresses(host):
            address = host
        elif not address and (found is None or may_host(here, found)):
            address = endpoint_host
        # steps that meet without ranks are in the order of their nodes' names
        rank = -1 if rank is None else rank
    elif found is None:
        rank = rank or 0
        address = address or endpoint_host
    else:
        rank = _group_rank(here.env) if rank is None else rank
        address = address or (
            endpoint_host if _is_ours(endpoint_host) else _towards(*found.endpoints[0])
        )
    name = f"{host}-{rank}" if slurm is None and found is not None else f"{rank}"
    node_id = f"{name}-{secrets.token_hex(4)}"
    return Node(node_id, rank, host, address, nproc, order, domain=node_domain(here))


def node_domain(here: Here) -> str:
    """This node's domain, "" where the job has no segments. Asks NVML, for at most 10 s.

    By NVRX_REPLACEMENT_GROUP_ID, else the ClusterUUID of its GPUs, its block in Slurm's topology, or its task of a job
    array whose tasks form one job. Raises UsageError where there is none, or NVML does not say.
    """
    launch = here.launch
    slurm = here.slurm
    segment = here.ft.segment
    if segment is None:
        return ""
    if launch.replacement_group_id is not None:
        return launch.replacement_group_id
    from nvrx_slurm.system import gpu_facts  # most jobs have no segments

    try:
        return next(iter(gpu_facts.cluster_uuids(here.env).values()))
    except Absent as why:
        nvlink = str(why)
    except HardwareError as error:
        raise UsageError(
            f"--ft-segment needs this node's NVLink domain: {error}; drain the node"
        ) from None
    if slurm is not None and slurm.block:
        return f"block {slurm.block}"
    if slurm is not None and slurm.array_task_id >= 0 and launch.endpoint is not None:
        return f"array task {slurm.array_task_id}"
    raise UsageError(
        f"--ft-segment {segment} needs this node's NVLink domain, and there is none ({nvlink}), nor a block"
        " of Slurm's topology; name it with NVRX_REPLACEMENT_GROUP_ID, or leave --ft-segment out"
    )


def _group_rank(env: Mapping[str, str]) -> int:
    """Slurm's order counts also where a container's launcher has filtered the rest of its variables."""
    for name in ("CROSS_SLURM_PROCID", "SLURM_PROCID", "GROUP_RANK"):
        text = env.get(name, "")
        if text.isdecimal() and len(text) < 8:
            return int(text)
    return -1


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_ours(host: str) -> bool:
    """Whether `host` is this machine: an address that can be bound here."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    return any(_can_bind(address) for address in _addresses(host))


def _towards(host: str, port: int) -> str:
    """The address of this machine that packets to `host` have; "" where it is not known. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
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
