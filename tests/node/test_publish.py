"""What a listener that hangs for ever costs the others: at most 50 ms, and the loop nothing."""

import asyncio
import contextlib
import os
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from nvrx_slurm.config.cores import agent_settings, coordinator_settings
from nvrx_slurm.config.layers import Config
from nvrx_slurm.config.otel import OtlpTarget
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.status import JobLabels
from nvrx_slurm.node.output import writer
from nvrx_slurm.node.output.writer import Writer
from nvrx_slurm.node.publish import collectors, status_file
from nvrx_slurm.node.publish.announce import Announcer, Comment
from nvrx_slurm.node.publish.collectors import MetricsFile, MetricsPush
from nvrx_slurm.node.publish.listeners import listeners
from nvrx_slurm.node.publish.publisher import Publisher
from nvrx_slurm.node.publish.status_file import StatusFile

pytestmark = pytest.mark.process

MOST_S = 0.05
WAIT_S = 10.0


class Clock:
    """Viewer: when it was told."""

    def __init__(self):
        self.at = []
        self.told = threading.Event()

    def tell(self, view):
        self.at.append(time.monotonic())
        self.told.set()

    async def close(self):
        pass


class Hanging:
    """What never returns until the test is over; counts who came."""

    def __init__(self):
        self.over = threading.Event()
        self.came = threading.Event()

    def __call__(self, *words):
        self.came.set()
        self.over.wait(WAIT_S)


@pytest.fixture
def hanging():
    one = Hanging()
    yield one
    one.over.set()


@pytest.fixture
def silent():
    """The URL of a server that accepts and never answers, and the first bytes that came."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as held:
        server.settimeout(WAIT_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        yield url, lambda: bytes(held.enter_context(server.accept()[0]).recv(5))


def publisher(*listeners, progress=None):
    config = Config()
    settings = coordinator_settings(config, agent_settings(config), 0.0)
    core = Coordinator(settings, asyncio.get_running_loop().time())
    return Publisher(core, JobLabels("7", "r0"), "me", progress, lambda: None, None, listeners)


def say(sentence):
    """Nobody hears it."""


def costs(make, came, is_bounded):
    """Publish with the listener `make()`, which hangs; another one is told in time, again and again."""

    async def run():
        clock = Clock()
        hangs = make()
        one = publisher(hangs, clock)
        for turn in range(5):
            clock.told.clear()
            began = time.monotonic()
            one.publish()
            assert time.monotonic() < began + MOST_S  # the loop goes on
            await asyncio.get_running_loop().run_in_executor(None, clock.told.wait, WAIT_S)
            assert clock.at[-1] - began < MOST_S
            if turn == 0:
                assert await asyncio.get_running_loop().run_in_executor(None, came)
        began = time.monotonic()
        await asyncio.wait_for(one.close(), is_bounded + 1.0)

    asyncio.run(run())


def test_a_status_file_that_hangs(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(status_file, "write_atomic", hanging)
    monkeypatch.setattr(status_file, "HANGS_S", 0.1)
    costs(lambda: StatusFile(tmp_path / "status.json"), lambda: hanging.came.wait(WAIT_S), 0.1)


def test_a_status_file_that_is_a_pipe_without_a_reader(tmp_path):
    """Only regular files are read, so it is replaced."""
    os.mkfifo(tmp_path / "status.json")
    costs(lambda: StatusFile(tmp_path / "status.json"), lambda: True, 1.0)


def test_a_metrics_file_that_hangs(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(collectors, "write_atomic", hanging)
    costs(lambda: MetricsFile(str(tmp_path / "m"), say), lambda: hanging.came.wait(WAIT_S), collectors._END_S)


def test_a_collector_that_never_answers(silent):
    url, came = silent
    costs(lambda: MetricsPush(OtlpTarget(url, every_s=0.0), say), lambda: came() == b"POST ", collectors._END_S)


def test_slurm_that_hangs(hanging, monkeypatch):
    monkeypatch.setattr("nvrx_slurm.node.publish.announce._END_S", 0.1)
    costs(lambda: Comment(hanging, say), lambda: hanging.came.wait(WAIT_S), 0.1)


def test_a_receiver_that_never_answers(silent, monkeypatch):
    url, came = silent
    monkeypatch.setattr("nvrx_slurm.node.publish.announce._END_S", 0.1)
    monkeypatch.setattr("nvrx_slurm.node.publish.announce._news", lambda view, began: [("restart", "one")])
    costs(lambda: Announcer(url, 0.0, say), lambda: came() == b"POST ", 0.1)


def test_all_that_is_wanted_listens(tmp_path):
    control = SimpleNamespace(set_comment=lambda job_id, text: None)
    job = SimpleNamespace(
        run_dir=SimpleNamespace(status=tmp_path / "status.json"),
        notify="http://127.0.0.1:1/x",
        slurm_comment=True,
        slurm=SimpleNamespace(job_id=7),
        control=control,
        metrics_file=str(tmp_path / "m"),
        otlp=OtlpTarget("http://127.0.0.1:1/x"),
    )

    async def kinds():
        return [type(one).__name__ for one in listeners(job, 0.0, say)]

    wanted = ["WaitLines", "StatusFile", "Announcer", "Comment", "MetricsFile", "MetricsPush"]
    assert asyncio.run(kinds()) == wanted


def test_a_writer_keeps_the_newest_or_all_and_says_what_hangs_once(hanging, monkeypatch):
    monkeypatch.setattr(writer, "HANGS_S", 0.02)

    async def run(most):
        said = []
        done = []
        hanging.over.clear()
        hanging.came.clear()
        one = Writer(said.append, "reach", most)
        one.put("it", hanging)
        hanging.came.wait(WAIT_S)
        for number in range(5):
            one.put("it", partial(done.append, number))
        await one.close(0.02)
        await one.close(0.02)
        assert not done
        hanging.over.set()
        await one.close(WAIT_S)
        return done, said

    sentence = "cannot reach it: it did not return within 0.02 s"
    assert asyncio.run(run(1)) == ([4], [sentence])
    assert asyncio.run(run(8)) == ([0, 1, 2, 3, 4], [sentence])


def test_a_defect_in_one_piece_of_work_is_said_and_the_next_one_is_done():
    async def run():
        said = []
        done = []
        one = Writer(said.append, most=4)
        one.put("it", lambda: [][0])
        one.put("it", lambda: done.append(1))
        await one.close(WAIT_S)
        return said, done

    said, done = asyncio.run(run())
    assert said == ["cannot write it: list index out of range"] and done == [1]
