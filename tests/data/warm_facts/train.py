"""A training script that writes facts about its process as JSON, each under a name. Arguments: WAY [NAME=VALUE ...].

It changes something before it imports torch, and again before it imports torch._dynamo, in the way that is named.
"""

import sys

FORKED = "torch" in getattr(sys.meta_path[0], "parked", ())
FACTS = {"before anything: torch is there": "torch" in sys.modules}

import argparse  # noqa: E402
import atexit  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402

from registries import named, registries  # noqa: E402

WAY, CYCLE = sys.argv[1], int(os.environ.get("NVRX_CYCLE", "9"))
HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(os.environ["FACTS_OUT"], f"{WAY}-{os.environ['FACTS_LABEL']}-{CYCLE}")
ORDER = []


def note_order():
    """Of the functions for the end of the process: this one was registered first, so it runs last."""
    sys.setprofile(None)
    with open(OUT + ".end.json", "w") as file:
        json.dump(ORDER, file)


def begin_order():
    def profile(frame, event, arg):
        if event == "call" and frame.f_back is None:
            ORDER.append(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")

    sys.setprofile(profile)


atexit.register(note_order)


# --- ways to change something ---------------------------------------------------------------------------------------


def pairs(when):
    with open(os.path.join(HERE, f"{when}.env")) as file:
        return dict(line.rstrip("\n").split("=", 1) for line in file)


def by_item(when):
    for name, value in pairs(when).items():
        os.environ[name] = value


def by_setdefault(when):
    for name, value in pairs(when).items():
        os.environ.setdefault(name, value)


def by_update(when):
    os.environ.update(pairs(when))


def by_bytes(when):
    for name, value in pairs(when).items():
        os.environb[name.encode()] = value.encode()


def by_putenv(when):
    for name, value in pairs(when).items():
        os.putenv(name, value)


def by_unset(when):
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "HOME") if when == "before" else ("PATH",):
        os.environ.pop(name, None)


def by_loader(when):
    import envfile

    envfile.load_dotenv(os.path.join(HERE, f"{when}.env"))


def by_arguments(when):
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument(f"--{when}", action="append", default=[])
    for word in vars(parser.parse_known_args()[0])[when]:
        name, _, value = word.partition("=")
        os.environ[name] = value


def by_json(when):
    with open(os.path.join(HERE, "config.json")) as file:
        os.environ.update(json.load(file)["env"][when])


def by_yaml(when):
    import yaml

    with open(os.path.join(HERE, "config.json")) as file:
        os.environ.update(yaml.safe_load(file)["env"][when])


def by_package(when):
    __import__(f"presets_{when}")


class _Finder:
    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name == self._name:
            sys.meta_path.remove(self)
            self._then()
        return None


def by_hook(when):
    name = "torch" if when == "before" else "torch._dynamo"
    sys.meta_path.insert(0, _Finder(name, lambda: by_item(when)))


def by_affinity(when):
    if when == "before":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def by_path(when):
    sys.path.insert(0, os.path.join(HERE, f"other_{when}"))


def by_logging(when):
    import logging.config

    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": True, "root": {"level": "ERROR"}, "loggers": {"torch.mine": {}}}
    )


def by_warnings(when):
    import warnings

    warnings.simplefilter("ignore" if when == "before" else "always", DeprecationWarning)
    warnings.filterwarnings("error", "of this test")


def by_order(when):
    """Parts of what torch imports come first, in another order, and some imports fail."""
    import importlib.util

    for name in ("sympy", "typing_extensions", "multiprocessing.reduction", "torch_that_is_not_there", "unittest.mock"):
        try:
            __import__(name)
        except ImportError:
            FACTS[f"{when}: {name} is not there"] = True
    if when == "before":
        spec = importlib.util.find_spec("torch")
        loader = type(spec.loader).__name__ if "torch" in sys.modules or not FORKED else "SourceFileLoader"
        FACTS["spec of torch"] = [spec.origin, spec.submodule_search_locations, spec.cached, loader]
        FACTS["torch is there after its spec was asked for"] = "torch" in sys.modules


def by_thread(when):
    import threading

    one = threading.Thread(target=__import__, args=("torch" if when == "before" else "torch._dynamo",))
    one.start()
    one.join()


def by_tempfile(when):
    import tempfile

    os.environ["TMPDIR"] = HERE if when == "before" else "/var/tmp"
    FACTS[f"{when}: first gettempdir"] = tempfile.gettempdir()


def by_nothing(when):
    """The shadow of a module of the standard library is beside the script in any case."""


WAYS = {name[3:]: found for name, found in list(globals().items()) if name.startswith("by_")}


# --- facts ----------------------------------------------------------------------------------------------------------


def getenv(name):
    import ctypes

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    value = libc.getenv(name.encode())
    return None if value is None else value.decode()


def loggers():
    import logging

    return {
        name: [one.level, one.disabled, one.propagate, one.parent.name, [str(type(each)) for each in one.handlers]]
        if isinstance(one, logging.Logger) else "place"
        for name, one in sorted(logging.root.manager.loggerDict.items())
    }  # fmt: skip


def world():
    """What imports of modules change, and what the process is."""
    import copyreg
    import gc
    import logging
    import multiprocessing.reduction
    import signal
    import socket
    import tempfile
    import threading
    import time
    import warnings

    names = [name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names]
    return {
        "own modules in their order": [name for name in names if name != "__main__"],
        "modules": sorted(name for name in sys.modules if name != "__main__"),
        "path": [*sys.path],
        "finders": [
            named(one) if isinstance(one, type) else str(type(one))
            for one in sys.meta_path
            if type(one).__name__ not in ("Journal", "StepFinder")  # the second one is gone with the import of torch
        ],
        "path hooks": [*map(named, sys.path_hooks)],
        "warnings": [*map(str, warnings.filters)],
        "loggers": loggers(),
        "logging": [str(type(one)) for one in logging.root.handlers] + [logging.root.level, len(logging._handlers)],
        "logger class": named(logging.getLoggerClass()),
        "pickled by": sorted(map(named, copyreg.dispatch_table)),
        "sent by": sorted(map(named, multiprocessing.reduction.ForkingPickler._extra_reducers)),
        "ends of threads": [named(getattr(one, "func", one)) for one in getattr(threading, "_threading_atexits", [])],
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_debug(), [*map(named, gc.callbacks)]],
        "handlers": {int(one): str(signal.getsignal(one)) for one in (2, 3, 14, 15, 17)},
        "hooks": [
            named(sys.excepthook),
            named(sys.displayhook),
            named(sys.unraisablehook),
            named(threading.excepthook),
        ],
        "builtins": sorted(vars(sys.modules["builtins"])),
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags(), sys.flags, sys._xoptions],
        "temporary": [tempfile.tempdir, tempfile.gettempdir()],
        "timeout": socket.getdefaulttimeout(),
        "zone": [time.timezone, time.tzname],
        "process": [os.getcwd(), sys.argv, sys.orig_argv[1:], sys.executable, sys.prefix, os.nice(0)],
        "scheduler": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
        "main": sorted(
            name for name in vars(sys.modules["__main__"]) if name.startswith("_") and "compiled" not in name
        ),
        "threads": len(sys._current_frames()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        **registries(),
    }


def add(when, facts):
    FACTS.update({f"{when}: {name}": value for name, value in facts.items()})


def variables(when):
    """As Python has them and as C has them."""
    for which in ("before", "after"):
        add(when, {name: [os.environ.get(name), getenv(name)] for name in pairs(which)})


def of_torch(torch):
    import hashlib
    import inspect

    def digest(tensor):
        return hashlib.sha256(repr(tensor.tolist()).encode()).hexdigest()

    torch.manual_seed(7)
    one = torch.randn(300, 301)
    return {
        "sum": one.sum().item().hex(),
        "sum of all rows": digest(one.sum(0)),
        "product": digest(one @ one.T),
        "softmax": digest(one.softmax(1).exp().tanh()),
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "parallel": torch.__config__.parallel_info(),
        "show": torch.__config__.show(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "precision": [torch.get_float32_matmul_precision(), str(torch.get_default_dtype())],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled],
        "jit": torch.jit._state._enabled.enabled,
        "debug level": str(torch.distributed.get_debug_level()) if torch.distributed.is_available() else "",
        "home": torch.hub._get_torch_home(),
        "gpus": [torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.is_initialized()],
        "logs": str(getattr(torch._logging._internal.log_state, "log_qname_to_level", "")),
        "artifacts": sorted(getattr(torch._logging._internal.log_state, "artifact_names", ())),
        "source": len(inspect.getsource(torch.nn.Linear)),
        "spec": [torch.__spec__.origin, type(torch.__spec__.loader).__name__, type(torch.__loader__).__name__],
        "functions": sorted(vars(torch)),
        "classes": sorted(vars(torch.nn)),
    }


def of_dynamo(torch):
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    import torch.fx.experimental._config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    graphs = []
    compiled = torch.compile(lambda x: x * 2 + 1, backend=lambda graph, inputs: graphs.append(1) or graph.forward)
    compiled(torch.ones(3))
    facts = {"graphs": len(graphs), "cache of inductor": cache_dir()}
    for module in (torch._dynamo, torch._inductor, torch._functorch, torch.fx.experimental):
        config = getattr(module, "config", None) or module._config
        found = config.get_config_copy()
        facts |= {
            f"{config.__name__}.{name}": str(value) for name, value in found.items() if " at 0x" not in str(value)
        }
    return facts


def shadows():
    """Modules of which there is another one beside the script or in a folder of its own."""
    names = ("queue", "typing_extensions", "sympy.printing")
    return {f"origin of {name}": getattr(sys.modules.get(name), "__file__", None) for name in names}


add("begin", world())
add("begin", shadows())
variables("begin")
WAYS[WAY]("before")
add("before", world())
add("before", shadows())
variables("before")
import torch  # noqa: E402

add("torch", world())
add("torch", shadows())
WAYS[WAY]("after")
variables("after")
add("after", of_torch(torch))
add("after", world())
optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
add("optimizer", world())
add("optimizer", shadows())
add("dynamo", of_dynamo(torch))
add("end", world())
add("end", shadows())
variables("end")
with open(OUT + ".json", "w") as file:
    json.dump({"forked": FORKED, "facts": FACTS}, file)
print("came", CYCLE, "pid", os.getpid(), flush=True)
atexit.register(begin_order)
if CYCLE < 9:
    gate = os.path.join(os.environ["NVRX_TEST_GATES"], f"end{CYCLE}")
    try:
        os.mkfifo(gate)
    except FileExistsError:
        pass
    os.close(os.open(gate, os.O_RDONLY))  # waits until Rig.open() has it open for writing
    sys.exit(int(os.environ["FACTS_CYCLES"]) > CYCLE)
