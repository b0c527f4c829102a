"""How an agent without a token gets it: by the site's user authentication, a fake one and a real private munged."""

import asyncio
import os
import secrets
import select
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
from wire_harness import JOB, NODE, TOKEN, Client, Raw, Server, joined, story

from nvrx_slurm import types as t
from nvrx_slurm.control import admission, handover
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import AuthError
from nvrx_slurm.slurm.munge import Munge

pytestmark = pytest.mark.fast


class FakeMunge:
    """What MUNGE promises: sealed by and for one user, opened once. `vault` is the site, shared by both ends."""

    def __init__(self, vault, user):
        self._vault = vault
        self._user = user

    def seal(self, payload):
        credential = secrets.token_hex(8)
        self._vault[credential] = (self._user, payload)
        return credential

    def open(self, credential):
        user, payload = self._vault.get(credential, ("", b""))
        if user != self._user:
            raise AuthError("the credential is not of this user")
        del self._vault[credential]
        return payload


def _munged_answers(munge):
    try:
        return munge.open(munge.seal(b"x")) == b"x"
    except AuthError:
        return False


@pytest.fixture(scope="module")
def munge_socket():
    """The socket of a private munged."""
    if shutil.which("munged") is None and not Path("/usr/sbin/munged").exists():
        if os.environ.get("NVRX_REQUIRE_SLURM") == "1":
            pytest.fail("NVRX_REQUIRE_SLURM=1, but munged is not installed")
        pytest.skip("munged is not installed: apt-get install munge")
    root = Path(tempfile.mkdtemp(prefix="nvrx-mg-"))
    key = root / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = (f"--socket={root}/s", f"--key-file={key}", f"--seed-file={root}/seed", f"--pid-file={root}/pid")
    argv = [shutil.which("munged") or "/usr/sbin/munged", "--foreground", "--force", *files, f"--log-file={root}/log"]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        munge = Munge.find(f"{root}/s")
        assert munge is not None
        deadline_s = time.monotonic() + 20
        while not _munged_answers(munge):  # it sends no event when it is ready
            assert time.monotonic() < deadline_s and process.poll() is None
            select.select([], [], [], 0.01)
        yield f"{root}/s"
    finally:
        process.terminate()
        process.wait(20)
        shutil.rmtree(root)


@pytest.fixture(params=["fake", pytest.param("munge", marks=pytest.mark.slurm)])
def credentials(request):
    """(the coordinator's, an agent's), of the same user."""
    if request.param == "fake":
        vault = {}
        return FakeMunge(vault, "me"), FakeMunge(vault, "me")
    path = request.getfixturevalue("munge_socket")
    ends = Munge.find(path), Munge.find(path)
    assert ends[0] is not None and ends[1] is not None
    return ends[0], ends[1]


def test_contract_of_credentials(credentials):
    ours, theirs = credentials
    sealed = ours.seal(b"payload \0 \xff")
    assert theirs.open(sealed) == b"payload \0 \xff"
    for wrong in (sealed, "", "MUNGE:nonsense:", "x" * 100_000, sealed[:-8] + "AAAAAAA:"):
        with pytest.raises(AuthError):
            ours.open(wrong)


def token_server(credentials):
    """Of a coordinator that knows the token."""
    one = handover.TokenServer(credentials, JOB)
    one.token = TOKEN
    return one


@story
async def test_an_agent_that_knows_no_token_lets_nobody_in_until_it_does(credentials):
    """Not even a peer without one. Then it serves as a coordinator that was elected."""
    ours, theirs = credentials
    async with Server(token="", credentials=ours) as server:
        for token in ("", TOKEN):
            async with Client(server.port, token=token, credentials=theirs) as client:
                await client.ended.wait()
                assert bool(server.said) is bool(token) and client.inbox.empty()  # who asks is not refused
        server.server.adopt(TOKEN)
        async with Client(server.port, token="", credentials=theirs) as client:
            await client.inbox.next(ag.Connected)


@story
async def test_agent_without_a_token_gets_it_and_joins(credentials):
    ours, theirs = credentials
    async with Server(credentials=ours) as server, Client(server.port, token="", credentials=theirs) as client:
        assert (await joined(server, client)).message.node == NODE


def test_payload_of_another_job_or_kind_is_no_request(credentials):
    ours, theirs = credentials
    for payload in (b"", b"nvrx-token-request\0other", b"nvrx-token\0" + JOB.encode() + b"\0t"):
        with pytest.raises(AuthError, match="another job"):
            token_server(ours).answer(theirs.seal(payload))
    with pytest.raises(AuthError, match="another job"):
        handover.read_answer(theirs, "other", token_server(ours).answer(handover.request(theirs, JOB)))


async def _ask(port, credential):
    """Whether the coordinator answers with something sealed."""
    async with Raw(port, token=None) as raw:
        await raw.say(handover.REQUESTS.encode(t.TokenRequest(JOB, credential)))
        answer = await raw.reader.read()
        assert TOKEN.encode() not in answer
        return len(answer) > 4 and bool(handover.REPLIES.decode(answer[4:]).credential)


@story
async def test_replayed_and_forged_requests_get_no_token(credentials):
    ours, theirs = credentials
    request = handover.request(theirs, JOB)
    async with Server(credentials=ours) as server:
        assert await _ask(server.port, request)
        for forged in (request, "", "MUNGE:xyz:", "\0" * 1000, "x" * 16_000):
            assert not await _ask(server.port, forged)
        assert server.inbox.empty()


@story
async def test_a_munged_that_hangs_delays_no_member_and_keeps_no_queue(monkeypatch):
    """Its calls run in a thread, one at a time. Strangers whose time is over do not wait for it any more."""
    monkeypatch.setattr(admission, "HANDSHAKE_TIMEOUT_S", 0.5)
    at_once = []
    opened = []
    go = threading.Event()

    class Hangs(FakeMunge):
        def open(self, credential):
            at_once.append(len(at_once) - len(opened) + 1)
            go.wait(10)
            opened.append(credential)
            return super().open(credential)

    vault = {}
    async with Server(credentials=Hangs(vault, "me")) as server:
        strangers = [asyncio.ensure_future(_ask(server.port, "x")) for _ in range(20)]
        async with Client(server.port) as client:
            await joined(server, client)
        assert await asyncio.gather(*strangers) == [False] * 20
        assert at_once == [1]  # the others' time was over before theirs
        asking = asyncio.ensure_future(_ask(server.port, handover.request(FakeMunge(vault, "me"), JOB)))
        go.set()
        assert await asking and at_once == [1, 1]


@story
async def test_other_users_get_no_token_and_cannot_give_one():
    """A stranger's coordinator on the first candidate cannot make the agent take a token of its own."""
    vault = {}
    me, stranger = FakeMunge(vault, "me"), FakeMunge(vault, "stranger")
    async with Server(token="evil", credentials=stranger) as fake, Server(credentials=me) as server:
        async with Client(fake.port, server.port, token="", credentials=me) as client:
            await joined(server, client)
        async with Client(server.port, token="", credentials=stranger, node=replace(NODE, node_id="x")) as bad:
            await server.inbox.next(ev.Lost)
            with pytest.raises(asyncio.TimeoutError):
                await bad.inbox.next(ag.Connected, 0.3)
        assert fake.inbox.empty() and server.inbox.empty()


def test_munge_that_is_not_there_is_an_error_not_a_crash(tmp_path):
    munge = Munge.find(str(tmp_path / "nobody"))
    if munge is None:
        pytest.skip("libmunge is not installed")
    with pytest.raises(AuthError, match="MUNGE"):
        munge.seal(b"x")
    with pytest.raises(AuthError):
        munge.open("MUNGE:x:")
