"""Tables of a process in which modules enter things when they are imported. nvrx-run itself ignores SIGUSR1."""

import sys


def named(one):
    return f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', repr(type(one)))}"


def loaded(name, attribute, default=()):
    return getattr(sys.modules.get(name), attribute, default)


def registries():
    """Tables of the process in which modules enter things, where they are loaded."""
    import codecs
    import faulthandler
    import locale
    import logging
    import signal
    import warnings
    import weakref

    finalizers = sorted(weakref.finalize._registry.values(), key=lambda info: info.index)
    util = "multiprocessing.util"
    return {
        "finalizers": [named(info.func) for info in finalizers],
        "finalizers of multiprocessing": [named(one) for one in loaded(util, "_finalizer_registry", {}).values()],
        "renewed after a fork": sorted(named(key[2]) for key in loaded(util, "_afterfork_registry")),
        "handlers of logs": [str(type(ref())) for ref in logging._handlerList],
        "named handlers": sorted(logging._handlers),
        "names of levels": sorted(map(str, logging._nameToLevel)),
        "all signals": {one.name: str(signal.getsignal(one)) for one in signal.Signals if one != signal.SIGUSR1},
        "lines": sorted(name for name in loaded("linecache", "cache") if "site-packages" in name),
        "warned": {
            name: sorted(str(key) for key in vars(module).get("__warningregistry__", ()) if key != "version")
            for name, module in sorted(sys.modules.items())
            if vars(module).get("__warningregistry__")
        },
        "warned once": sorted(map(str, warnings.onceregistry)),
        "extensions of pickle": sorted(map(str, loaded("copyreg", "_extension_registry"))),
        "locale": [locale.setlocale(one) for one in (locale.LC_CTYPE, locale.LC_NUMERIC, locale.LC_TIME)],
        "text domain": loaded("gettext", "_current_domain", None),
        "types of files": [loaded("mimetypes", "inited", None), len(loaded("mimetypes", "types_map"))],
        "errors of codecs": [named(codecs.lookup_error(one)) for one in ("strict", "ignore", "surrogateescape")],
        "faulthandler": faulthandler.is_enabled(),
        "tracing": [sys.gettrace(), sys.getprofile(), loaded("threading", "_trace_hook", None)],
        "decimal": str(sys.modules["decimal"].getcontext()) if "decimal" in sys.modules else None,
        "streams": [type(one).__name__ for one in (sys.stdin, sys.stdout, sys.stderr)],
        "adapters": sorted(map(str, loaded("sqlite3", "adapters", {}))),
        "schemes of addresses": sorted(loaded("urllib.parse", "uses_netloc")),
        "opener of addresses": str(loaded("urllib.request", "_opener", None)),
        "executors": len(loaded("concurrent.futures.thread", "_threads_queues")),
        "loops": str(type(loaded("asyncio.events", "_event_loop_policy", None))),
    }
