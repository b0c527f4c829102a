"""The store's view and the barriers, without ranks."""

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from stage import free_port

from nvrx_slurm.core.inprocess.barrier import Arrival, Outcome, Status
from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.environment import Environment
from nvrx_slurm.inprocess.store.barriers import Iteration, latest, serve_barrier
from nvrx_slurm.inprocess.store.stores import FileStore, PrefixStore, StoreLost, StoreView, TCPStore, listen
from nvrx_slurm.inprocess.wrapper import Wrapper

pytestmark = pytest.mark.process


@pytest.fixture(params=["tcp", "file", "torch's own"])
def view(request, tmp_path, monkeypatch):
    if request.param == "tcp":
        monkeypatch.setenv("RANK", "0")
        yield StoreView(TCPStore("127.0.0.1", free_port()), "p/")
    elif request.param == "file":
        yield StoreView(FileStore(str(tmp_path / "store")), "p/")
    else:
        yield StoreView(dist.HashStore(), "p/")


def test_a_view_does_what_stores_do(view):
    view.set("a", "1")
    view.set("b", b"2")
    view.set("c", b"3")
    assert view.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
    assert view.check(["a", "b"]) and not view.check(["a", "d"])
    assert (view.add("n", 2), view.add("n", 0)) == (2, 2)
    assert (view.compare_set("once", "", "x"), view.compare_set("once", "", "y")) == (b"x", b"x")
    assert view.delete_key("a") and not view.check(["a"])
    view.under("q").set("a", "4")
    assert view.get("q/a") == b"4"
    assert view.came(["b"], 1.0) and not view.came(["never"], 0.05)
    for timeout_s in (0.0101, 0.5019):  # torch waits for whole milliseconds: still no reason to call it lost
        assert not view.came(["never"], timeout_s)
    with pytest.raises(TimeoutError, match="no never within 0.05 s"):
        view.wait(["never"], timedelta(milliseconds=50))


def test_torchs_methods_stay_torchs(tmp_path):
    """Our stores override nothing of torch's, whatever it adds."""
    ours = {
        name
        for kind in (TCPStore, FileStore, PrefixStore)
        for base in kind.__mro__
        for name in vars(base)
        if base.__module__.startswith("nvrx_slurm") and not name.startswith("_")
    }
    assert ours == {"serves"}
    assert not {name for name in ours if hasattr(dist.Store, name)}
    prefixed = PrefixStore(3, dist.HashStore())
    prefixed.set("a", "1")
    assert prefixed.get("a") == b"1"


def test_a_store_that_cannot_serve_is_a_client(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    server, client = TCPStore(), TCPStore()
    assert (server.serves, client.serves) == (True, False)
    client.set("a", "1")
    assert server.get("a") == b"1"
    del server
    with pytest.raises(StoreLost, match="cannot be reached any more"):
        for _ in range(100):
            StoreView(client).get("a")


@pytest.mark.parametrize("rank, queued", [("0", 0), ("1", 4)])
def test_a_server_that_is_no_store(monkeypatch, rank, queued):
    """It says nothing, which torch waits for without a bound, or takes no connection: its queue is full."""
    monkeypatch.setenv("RANK", rank)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as stack:
        port = silent.getsockname()[1]
        for _ in range(queued):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        with pytest.raises(StoreLost, match=f"127.0.0.1:{port} .* has not answered like a store"):
            TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3))
    for thread in threading.enumerate():  # one that comes back from C++ while Python ends would abort the process
        if thread.name == "nvrx-store":
            thread.join(30.0)
            assert not thread.is_alive()


def test_a_port_that_is_none(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for port in ("", "x", "0", "70000"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(UsageError, match="MASTER_PORT"):
            TCPStore()


def test_a_factory_that_makes_no_store():
    def factory(**kwargs):
        assert kwargs == {"a": 1}
        return 3

    arguments = Wrapper(store_factory=factory, store_kwargs={"a": 1})
    with pytest.raises(TypeError, match="^store_factory must return a .*Store, not 3 as <function .*factory"):
        arguments.make_store()


# A name that is loopback where it belongs to (Debian: 127.0.1.1), and nowhere else.
OWN_NAME = "0x7f.1"  # the resolver takes it for 127.0.0.1, and it does not look like that


def test_a_name_that_is_loopback_here_is_served_on_all_addresses():
    assert socket.gethostbyname(OWN_NAME) == "127.0.0.1"
    port = free_port()
    with listen(OWN_NAME, port) or pytest.fail("the port is taken") as listening:
        assert listening.getsockname()[0] in ("::", "0.0.0.0")
        with listen("localhost", free_port()) or pytest.fail("the port is taken") as local:
            assert local.getsockname()[0] in ("::1", "127.0.0.1")


def test_no_rank_is_told_to_meet_at_somebody_elses_loopback(monkeypatch):
    """A rank on rank 0's host becomes the new rank 0: the others reach that host by the name they were given."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for master, expected in ((OWN_NAME, OWN_NAME), ("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")):
        monkeypatch.setenv("MASTER_ADDR", master)
        environment = Environment()
        for rank in (0, 1):
            address, _ = environment.reserve(rank)
            assert address in (expected, "::1") or rank == 0 and address == master
        environment.release()


def test_the_first_end_counts(view):
    done, broken = Iteration(view, 0), Iteration(view, 1)
    done.returned(2)
    done.returned(2)
    done.interrupt(InterruptionRecord(1, Interruption.TERMINATED, "too late"))
    broken.interrupt(InterruptionRecord(1, Interruption.EXCEPTION, "why"))
    broken.returned(1)
    assert (done.await_end(), broken.await_end()) == (True, False)
    assert broken.await_start(1.0) is None  # nobody waits for a rank 0 that is gone
    first = broken.cause()
    assert first.sentence() == "rank 1: exception: why"


def test_one_result_whichever_server_gives_it(view):
    this = Iteration(view, 0)
    for rank in (0, 2):
        assert this.arrive(rank, Arrival(Status.READY, rank, 3))
    this.mark_gone(1)
    assert not this.arrive(1, Arrival(Status.READY, 1, 3)), "it was declared gone"
    results = []
    for _ in range(2):
        results.append(serve_barrier(this, 3, (), 1.0, closes=False))
        assert latest(view) == (0, results[-1])
        view.delete_key("latest")  # as if the first had died before; monitors follow it, not to speak for the dead
    assert results[0] == results[1] and (results[0].terminated, results[0].gone) == ({1}, {1})
    keys = [f"0/out/{rank}" for rank in range(3)]
    assert view.check(keys)
    this.delete_keys([0, 1, 2])
    assert not any(view.check([key]) for key in keys)
    assert this.arrive(1, Arrival(Status.READY, 1, 3)) and this.await_result(1.0) == results[0], "it comes late"


def test_a_missing_rank_is_declared_gone(view):
    this = Iteration(view, 0)
    this.arrive(0, Arrival(Status.READY, 0, 2))
    this.interrupt(InterruptionRecord(0, Interruption.EXCEPTION))
    began_s = time.monotonic()
    result = serve_barrier(this, 2, (), 0.1, closes=False)
    assert (result.outcome, result.gone) == (Outcome.NEXT, {1})
    assert time.monotonic() < began_s + 5.0, "it is not waited for longer than for the iteration's end"
