"""A training script that imports nothing of nvrx_slurm. Each rank trains in another way: step_kinds.py OUT [KIND ...]

Writes OUT/KIND.json: steps that were made, steps in the page of the rank (null: it has none), digest of the weights,
what the process would not have under torchrun, and for a compiled step its graphs and breaks.
"""

FOUND = sorted(__import__("sys").modules)

import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402

with open("/proc/self/environ", "rb") as _file:
    KERNEL = _file.read().decode().split("\0")
OURS = re.compile(r"(nvrx|torch|ctypes|mmap|json|NVRX_PAGE|NVRX_TEMPLATE|PYTHONPATH=.*/warm)|/.*nvrx.*warm$")
TRACES = [
    *filter(OURS.match, [*FOUND, *os.environ, *sys.path, *KERNEL]),
    *(name for name in os.listdir("/proc/self/fd") if int(name) > 3),  # 3 is this listing's own
]

import hashlib  # noqa: E402
import json  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.optim import SGD, Adafactor, Adam, AdamW  # noqa: E402

STEPS = 6


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def loss_of(net):
    return net(torch.ones(4, 8)).square().mean()


def backward(net, optimizer):
    optimizer.zero_grad()
    loss = loss_of(net)
    loss.backward()
    return loss


def train(net, optimizer, steps=STEPS, step=None):
    for _ in range(steps):
        backward(net, optimizer)
        (step or optimizer.step)()
    return steps


def plain(make, **flags):
    return lambda net: train(net, make(net.parameters(), **flags))


def sgd(net):
    return SGD(net.parameters())


def lbfgs(net):
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    return train(net, optimizer, step=lambda: optimizer.step(partial(backward, net, optimizer)))


def scaler(net):
    """Each third step is skipped: its gradients are infinite."""
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu")
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(net) * (float("inf") if number % 3 == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return STEPS - STEPS // 3


def accumulation(net):
    optimizer = sgd(net)
    return train(net, optimizer, step=lambda: (loss_of(net).backward(), optimizer.step()))


def scheduled(net):
    optimizer = AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return train(net, optimizer, step=lambda: (optimizer.step(), scheduler.step()))


def gan(net):
    """The first optimizer makes three steps for each of the second."""
    other = model()
    first, second = Adam(net.parameters()), Adam(other.parameters())
    for _ in range(STEPS):
        train(net, first, 3)
        train(other, second, 1)
    return 3 * STEPS


def by_groups(net):
    """A call for each group of parameters, as DeepSpeed makes them."""
    optimizer = SGD([{"params": [one]} for one in net.parameters()])
    groups = optimizer.param_groups

    def step():
        for one in groups:
            optimizer.param_groups = [one]
            optimizer.step()
        optimizer.param_groups = groups

    return train(net, optimizer, step=step)


def replaced(net):
    """Its parameters become others, as those of a model that is made on another device."""
    optimizer = sgd(net)
    made = train(net, optimizer)
    net.load_state_dict(model().state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = [*net.parameters()]
    return made + train(net, optimizer)


def trial(net):
    """An optimizer that is gone before the training begins, as of a search for the learning rate: its steps count."""
    return train(net, sgd(net), 2) + train(net, AdamW(net.parameters()))


def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def zero(net):
    group()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return train(net, ZeroRedundancyOptimizer(net.parameters(), AdamW, lr=0.01))


def fsdp2(net):
    group()
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=dist.init_device_mesh("cpu", (1,)))
    return train(net, AdamW(net.parameters()))


def ddp(net):
    group()
    return train(torch.nn.parallel.DistributedDataParallel(net), sgd(net))


class Users(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.01)


class Nested(SGD):
    """Its step calls that of its base, around which torch has its hooks, too."""

    def step(self, closure=None):
        return super().step(closure)


def nested(net):
    """From its second optimizer on the step of the base is wrapped."""
    return sum(train(net, make(net.parameters())) for make in (Nested, SGD, Nested))


def in_a_child(net):
    """A child that was forked makes steps, which are not those of the rank."""
    optimizer = sgd(net)
    made = train(net, optimizer)
    pid = os.fork()
    if not pid:
        train(net, optimizer)
        os._exit(0)
    os.waitpid(pid, 0)
    return made


def closes_all(net):
    os.closerange(3, 4096)
    return train(net, sgd(net))


GRAPHS = []


def compiled(net):
    """The step alone; eager code for a backend, since there may be no compiler."""

    def note(graph, inputs):
        GRAPHS.append(len(graph.graph.nodes))
        return graph.forward

    optimizer = AdamW(net.parameters())
    made = train(net, optimizer, step=torch.compile(optimizer.step, backend=note))
    counters = torch._dynamo.utils.counters
    GRAPHS.append({name: dict(counters[name]) for name in ("stats", "graph_break")})
    return made


KINDS = {
    "sgd": plain(SGD, momentum=0.9),
    "adamw": plain(AdamW),
    "foreach": plain(AdamW, foreach=True),
    "fused": plain(AdamW, fused=True),
    "adafactor": plain(Adafactor),
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
    "users": plain(Users, defaults={}),
    "nested": nested,
    "in_a_child": in_a_child,
    "closes_all": closes_all,
    "compiled": compiled,
}


def page():
    """The words STEP to LONGEST_STEP of this rank's page; None: it is not mapped here."""
    import ctypes

    with open("/proc/self/maps") as maps:
        place = re.search(r"^(\w+)-.*memfd:nvrx-rank", maps.read(), re.M)
    return (ctypes.c_int64 * 5).from_address(int(place[1], 16) + 8 * 24)[:] if place else None


def digest(net):
    values = [getattr(value, "full_tensor", value.clone)() for value in net.state_dict().values()]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


kind = (sys.argv[2:] or [*KINDS])[int(os.environ["RANK"])]
net = model()
facts = {
    "made": KINDS[kind](net),
    "words": page(),
    "weights": digest(net),
    "traces": TRACES,
    "graphs": GRAPHS,
    "forked": "torch" in getattr(sys.meta_path[0], "entries", {}),
}
with open(f"{sys.argv[1]}/{kind}.json", "w") as file:
    json.dump(facts, file)
