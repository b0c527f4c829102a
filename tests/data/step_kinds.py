"""A training script that imports nothing of nvrx_slurm. Each rank trains in another way: step_kinds.py OUT KIND ...

Prints one line of JSON: kind, steps that were made, steps in the page of the rank (null: it has none), digest of the
weights, what the process would not have under torchrun, and for a compiled step its graphs and breaks.
"""

FOUND = sorted(__import__("sys").modules)

import os  # noqa: E402
import sys  # noqa: E402

with open("/proc/self/environ", "rb") as _file:
    KERNEL = _file.read()
TRACES = [
    *(name for name in FOUND if name.startswith(("nvrx", "torch", "ctypes", "mmap", "json"))),
    *(name for name in os.environ if name in ("NVRX_PAGE", "NVRX_TEMPLATE")),
    *(path for path in sys.path if "nvrx" in path and path.endswith("warm")),
    *(one.decode() for one in KERNEL.split(b"\0") if one.startswith((b"NVRX_PAGE", b"NVRX_TEMPLATE"))),
    *(one.decode() for one in KERNEL.split(b"\0") if one.startswith(b"PYTHONPATH=") and b"/warm" in one),
    *(name for name in os.listdir("/proc/self/fd") if int(name) > 3),  # 3 is this listing's own
]

import hashlib  # noqa: E402
import json  # noqa: E402

import torch  # noqa: E402

STEPS = 6


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def loss_of(net):
    return net(torch.ones(4, 8)).square().mean()


def train(net, optimizer, steps=STEPS):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()
    return steps


def plain(make):
    def run():
        net = model()
        return net, train(net, make(net.parameters()))

    return run


def lbfgs():
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return net, STEPS


def scaler():
    """Each third step is skipped: its gradients are infinite."""
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.01), torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net) * (float("inf") if number % 3 == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return net, STEPS - STEPS // 3


def accumulation():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for number in range(4 * STEPS):
        loss_of(net).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return net, STEPS


def scheduled():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(STEPS):
        train(net, optimizer, 1)
        scheduler.step()
    return net, STEPS


def gan():
    """The first optimizer makes three steps for each of the second."""
    net, other = model(), model()
    first, second = torch.optim.Adam(net.parameters()), torch.optim.Adam(other.parameters())
    for _ in range(STEPS):
        train(net, first, 3)
        train(other, second, 1)
    return net, 3 * STEPS


def by_groups():
    """A call for each group of parameters, as DeepSpeed makes them."""
    net = model()
    optimizer = torch.optim.SGD([{"params": [one]} for one in net.parameters()], 0.01)
    groups = optimizer.param_groups
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        for one in groups:
            optimizer.param_groups = [one]
            optimizer.step()
        optimizer.param_groups = groups
    return net, STEPS


def replaced():
    """Its parameters become others, as those of a model that is made on another device."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    train(net, optimizer, 2)
    other = model()
    net.load_state_dict(other.state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = [*net.parameters()]
    return net, 2 + train(net, optimizer)


def trial():
    """An optimizer that is gone before the training begins, as of a search for the learning rate: its steps count."""
    net = model()
    train(net, torch.optim.SGD(net.parameters(), 0.01), 2)
    return net, 2 + train(net, torch.optim.AdamW(net.parameters()))


def group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist


def zero():
    group()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = model()
    return net, train(net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01))


def fsdp2():
    group()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    return net, train(net, torch.optim.AdamW(net.parameters()))


def ddp():
    group()
    net = torch.nn.parallel.DistributedDataParallel(model())
    return net.module, train(net, torch.optim.SGD(net.parameters(), 0.01))


class Users(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


class Nested(torch.optim.SGD):
    """Its step calls that of its base, around which torch has its hooks, too."""

    def step(self, closure=None):
        return super().step(closure)


def nested():
    net, other = model(), model()
    made = train(net, Nested(net.parameters(), 0.01))
    train(other, torch.optim.SGD(other.parameters(), 0.01))  # from now on the step of the base is wrapped
    optimizer = Nested(net.parameters(), 0.01)
    return net, made + STEPS + train(net, optimizer)


def in_a_child():
    """A child that was forked makes steps, which are not those of the rank."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    train(net, optimizer, 2)
    pid = os.fork()
    if not pid:
        train(net, optimizer)
        os._exit(0)
    os.waitpid(pid, 0)
    return net, 2 + train(net, optimizer)


def closes_all():
    os.closerange(3, 4096)
    net = model()
    return net, train(net, torch.optim.SGD(net.parameters(), 0.01))


GRAPHS = []


def compiled():
    """The step alone; eager code for a backend, since there may be no compiler."""
    import torch._dynamo

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def note(graph, inputs):
        GRAPHS.append(len(graph.graph.nodes))
        return graph.forward

    step = torch.compile(optimizer.step, backend=note)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(net).backward()
        step()
    counters = torch._dynamo.utils.counters
    GRAPHS.append({name: dict(counters[name]) for name in ("stats", "graph_break")})
    return net, STEPS


KINDS = {
    "sgd": plain(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)),
    "adamw": plain(torch.optim.AdamW),
    "foreach": plain(lambda p: torch.optim.AdamW(p, foreach=True)),
    "fused": plain(lambda p: torch.optim.AdamW(p, fused=True)),
    "adafactor": plain(torch.optim.Adafactor),
    "lbfgs": lbfgs,
    "scaler": scaler,
    "accumulation": accumulation,
    "scheduled": scheduled,
    "gan": gan,
    "by_groups": by_groups,
    "replaced": replaced,
    "trial": trial,
    "zero": zero,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "users": plain(Users),
    "nested": nested,
    "in_a_child": in_a_child,
    "closes_all": closes_all,
    "compiled": compiled,
}


def page():
    """The words STEP to LONGEST_STEP of this rank's page; None: it is not mapped here."""
    import ctypes

    with open("/proc/self/maps") as maps:
        places = [line.split("-")[0] for line in maps if "memfd:nvrx-rank" in line]
    return (ctypes.c_int64 * 5).from_address(int(places[0], 16) + 8 * 24)[:] if places else None


def digest(net):
    values = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in net.state_dict().values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


if __name__ == "__main__":
    kind = sys.argv[2 + int(os.environ["RANK"])]
    net, made = KINDS[kind]()
    words = page()
    facts = {"kind": kind, "made": made, "words": words, "weights": digest(net), "traces": TRACES, "graphs": GRAPHS}
    with open(f"{sys.argv[1]}/{kind}.json", "w") as file:
        json.dump({**facts, "forked": "torch" in getattr(sys.meta_path[0], "entries", {})}, file)
