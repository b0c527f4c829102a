"""NICs: ports, counters that wrap, start anew or stand still, and the NICs that are near each GPU."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from recorded import Node

from nvrx_slurm.health import cache, registry
from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.checks import counters, nic
from nvrx_slurm.health.checks.nic import Earlier, PortFacts, judge_ports, learn_ports
from nvrx_slurm.health.runner import examine
from nvrx_slurm.system import pci
from nvrx_slurm.system.nics import Port

CHECKS = registry.built_in()
F, U, N, P = Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.PASS
IB = "/sys/class/infiniband"


@pytest.fixture
def node(dgx: Node) -> Node:
    (dgx / f"/run/user/{os.geteuid()}").mkdir(parents=True, exist_ok=True)
    return dgx


def found(node: Node, name: str, **expect: object) -> tuple[Verdict, str]:
    return examine(CHECKS[name], NodeView(str(node.root), {}), registry.defaults(CHECKS.values()) | expect)


def port(node: Node, nic: str, file: str, text: str) -> None:
    node.write(f"{IB}/{nic}/ports/1/{file}", f"{text}\n")


# --- ports ----------------------------------------------------------------------------------------------------------


def test_a_port_that_was_active_since_boot_must_be(node: Node) -> None:
    port(node, "mlx5_7", "state", "1: DOWN")  # never in use
    assert found(node, "nic-ports") == (P, "7 of 8 ports are active")
    port(node, "mlx5_3", "state", "1: DOWN")
    port(node, "mlx5_3", "phys_state", "3: Disabled")
    for _ in range(2):  # also at the next look
        assert found(node, "nic-ports") == (F, "mlx5_3/1 is DOWN, Disabled")
    shutil.rmtree(node / f"{IB}/mlx5_2/ports/1")
    assert found(node, "nic-ports") == (F, "mlx5_2/1 is not there, mlx5_3/1 is DOWN, Disabled")
    node.write("/proc/sys/kernel/random/boot_id", "another\n")
    assert found(node, "nic-ports")[0] is P


def test_the_ports_that_the_site_names_must_be_active(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nic, "_SETTLE_S", 0.5)
    port(node, "mlx5_3", "state", "2: INIT")
    assert found(node, "nic-ports", nic_ports=("mlx5_0/1", "mlx5_3/1")) == (F, "mlx5_3/1 is INIT, LinkUp")
    assert found(node, "nic-ports", nic_ports=("mlx5_0/1", "mlx5_0/2")) == (F, "mlx5_0/2 is not there")
    assert found(node, "nic-ports", nic_ports=("mlx5_0/1",))[0] is P


def test_a_port_must_be_as_fast_as_it_was_and_as_the_site_says(node: Node) -> None:
    assert found(node, "nic-ports", nic_rate_gbps=400)[0] is P
    port(node, "mlx5_1", "rate", "100 Gb/sec (1X NDR)")
    assert found(node, "nic-ports") == (F, "mlx5_1/1 runs at 100 instead of 400 Gb/s")
    port(node, "mlx5_1", "rate", "400 Gb/sec (4X NDR)")
    assert found(node, "nic-ports", nic_rate_gbps=800)[0] is F


@pytest.mark.parametrize("junk", ["", "junk", "1.5", "-1 Gb/sec", "²00 Gb/sec", "9999999999 Gb/sec", "400 MB/sec"])
def test_a_rate_that_is_none_is_unknown(node: Node, junk: str) -> None:
    assert found(node, "nic-ports")[0] is P
    port(node, "mlx5_1", "rate", junk)
    verdict, text = found(node, "nic-ports")
    assert verdict is U and "infiniband/mlx5_1/ports/1/rate holds " in text
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_2", "state", "1: DOWN")
    assert found(node, "nic-ports")[0] is F, "hidden by what is unknown"


@pytest.mark.parametrize("junk", ["", "junk", "4:", "4: ACTIVELY", "4", "UNKNOWN", "9: UNKNOWN", "\x00\x01", "-1"])
def test_a_state_that_is_none_is_unknown(node: Node, junk: str) -> None:
    assert found(node, "nic-ports")[0] is P
    port(node, "mlx5_1", "state", junk)
    node.write("/elsewhere/mlx5_0", junk)
    for name in ("nic-ports", "gpu-nics"):
        verdict, text = found(node, name)
        assert verdict is U and "infiniband/mlx5_1/ports/1/state holds " in text
    port(node, "mlx5_1", "state", "4: ACTIVE")
    verdict, text = found(node, "nic-ports", link_state_path="/elsewhere/{nic}")
    assert verdict is U and "/elsewhere/mlx5_0 holds " in text


@pytest.mark.parametrize("ones", [2**32 - 1, 2**64 - 1])
def test_a_counter_of_all_ones_is_unknown_and_not_counted(node: Node, ones: int) -> None:
    """What a NIC reads as that is gone from its bus; later it is back, with the counts that it had."""
    for file in ("link_downed", "symbol_error"):
        port(node, "mlx5_2", f"counters/{file}", "3")
    assert found(node, "nic-errors")[0] is P
    for file in ("link_downed", "symbol_error"):
        port(node, "mlx5_2", f"counters/{file}", str(ones))
    verdict, text = found(node, "nic-errors")
    assert verdict is U and "mlx5_2/1 link_downed" in text and "all ones" in text
    port(node, "mlx5_3", "counters/link_downed", "1")
    assert found(node, "nic-errors")[0] is F, "hidden by what is unknown"
    port(node, "mlx5_2", "counters/link_downed", "4")
    port(node, "mlx5_2", "counters/symbol_error", "3")
    assert found(node, "nic-errors", nic_link_downed_max=1) == (P, "nothing to speak of lately")
    assert "mlx5_2/1 went down 1 times" in found(node, "nic-errors")[1]


def _full(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The file system with /run has no room; returns what was refused."""
    refused: list[str] = []

    def no_room(path: str, plain: object) -> None:
        refused.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "write_private", no_room)
    return refused


def test_a_port_of_the_site_fails_also_where_nothing_can_be_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Path(cache.private_directory(NodeView(str(node.root))))
    directory.chmod(0o777)  # so that what is in it cannot be trusted
    port(node, "mlx5_3", "state", "1: DOWN")
    assert found(node, "nic-ports", nic_ports=("mlx5_3/1",)) == (F, "mlx5_3/1 is DOWN, LinkUp")
    assert found(node, "gpu-nics", nic_ports=("mlx5_3/1",))[0] is F
    for name in ("nic-ports", "gpu-nics"):
        verdict, text = found(node, name)
        assert verdict is U and "is not a directory that only its owner" in text
    directory.chmod(0o700)
    refused = _full(node, monkeypatch)
    assert found(node, "nic-ports", nic_ports=("mlx5_3/1",)) == (F, "mlx5_3/1 is DOWN, LinkUp")
    assert found(node, "nic-ports") == (U, "how ports were cannot be kept: No space left on device")
    assert len(refused) == 2


def test_no_infiniband_does_not_apply_and_unreadable_is_unknown(node: Node) -> None:
    (node / f"{IB}/mlx5_3/ports/1/state").unlink()
    assert found(node, "nic-ports") == (U, "NIC mlx5_3 port 1: its state cannot be read")
    shutil.rmtree(node / IB)
    for name in ("nic-ports", "nic-errors", "gpu-nics"):
        assert found(node, name)[0] is N


def test_files_elsewhere_by_template(node: Node) -> None:
    """--ft-link-state-path-template and --ft-link-down-path-template of seed 000."""
    for index in range(8):
        node.write(f"/ib/mlx5_{index}/state", "4: ACTIVE\n")
        node.write(f"/ib/mlx5_{index}/downs", "3\n")
    templates = {"link_state_path": "/ib/{nic}/state", "link_downed_path": "/ib/{nic}/downs"}
    assert found(node, "nic-ports", **templates)[0] is P
    assert found(node, "nic-errors", **templates)[0] is P
    node.write("/ib/mlx5_4/state", "1: DOWN\n")
    node.write("/ib/mlx5_5/downs", "4\n")
    assert found(node, "nic-ports", **templates) == (F, "mlx5_4/1 is DOWN, LinkUp")
    assert found(node, "nic-errors", **templates) == (F, "the link of mlx5_5/1 went down 1 times")
    node.write("/ib/mlx5_5/downs", "junk\n")
    assert found(node, "nic-errors", **templates) == (U, "/ib/mlx5_5/downs holds 'junk' instead of a whole number")
    assert found(node, "nic-ports", link_state_path="/nowhere/{nic}")[0] is U


def test_ports_are_learned() -> None:
    ports = {"a/1": Port("a", 1, "ACTIVE", 0, rate_gbps=400.0), "b/1": Port("b", 1, "DOWN", 0)}
    assert learn_ports(PortFacts(ports, Earlier())) == {"nic_ports": ("a/1",), "nic_rate_gbps": 400.0}
    ports["c/1"] = Port("c", 1, "ACTIVE", 0)
    assert learn_ports(PortFacts(ports, Earlier())) == {"nic_ports": ("a/1", "c/1")}
    assert judge_ports(PortFacts(ports, Earlier({"b/1": 0.0})), {"nic_ports": (), "nic_rate_gbps": None}) == (
        F,
        "b/1 is DOWN",
    )


# --- counters -------------------------------------------------------------------------------------------------------


def test_a_link_that_went_down_is_told_for_an_hour(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(cache, "now_s", lambda: now_s[0])
    port(node, "mlx5_2", "counters/link_downed", "7")
    assert found(node, "nic-errors") == (P, "nothing to speak of lately")  # what was before the first look
    port(node, "mlx5_2", "counters/link_downed", "9")
    for at_s in (1060.0, 1120.0, 4660.0):
        now_s[0] = at_s
        assert found(node, "nic-errors") == (F, "the link of mlx5_2/1 went down 2 times")
    assert found(node, "nic-errors", nic_link_downed_max=2)[0] is P
    now_s[0] = 4661.0
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_2", "counters/link_downed", "0")  # reset
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_2", "counters/link_downed", "1")
    assert found(node, "nic-errors") == (F, "the link of mlx5_2/1 went down 1 times")


def test_a_counter_that_steps_back_is_no_error(node: Node) -> None:
    port(node, "mlx5_2", "counters/symbol_error", "5000")
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_2", "counters/symbol_error", "4999")
    assert found(node, "nic-errors") == (P, "nothing to speak of lately; mlx5_2/1 symbol_error began anew")
    port(node, "mlx5_2", "counters/symbol_error", "6000")  # from there on
    assert found(node, "nic-errors") == (F, "mlx5_2/1 counted 1001 x symbol_error")


def test_many_errors_fail_and_a_counter_at_its_end_is_unknown(node: Node) -> None:
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_6", "counters/symbol_error", "1000")
    assert found(node, "nic-errors")[0] is P
    port(node, "mlx5_6", "counters/symbol_error", "1001")
    assert found(node, "nic-errors") == (F, "mlx5_6/1 counted 1001 x symbol_error")
    assert found(node, "nic-errors", nic_errors_max=5000)[0] is P
    port(node, "mlx5_1", "counters/link_downed", "255")
    said = found(node, "nic-errors", nic_errors_max=5000, nic_link_downed_max=255)
    assert said == (U, "link_downed of mlx5_1/1 is at its end; reset it with perfquery -R")


@pytest.mark.parametrize("junk", ["", "-1", "9" * 30, "0x7", "\x00"])
def test_counters_that_are_none_are_left_out(node: Node, junk: str) -> None:
    for file in (node / f"{IB}/mlx5_0/ports/1/counters").iterdir():
        file.write_text(junk)
    assert found(node, "nic-errors")[0] is P


@pytest.mark.parametrize(
    "kept",
    [
        "{",
        "[]",
        "null",
        '{"counters": 7}',
        '{"counters": {"mlx5_0/1 link_downed": 7}}',
        '{"counters": {"mlx5_0/1 link_downed": []}}',
        '{"counters": {"mlx5_0/1 link_downed": [1, 2]}}',
        '{"counters": {"mlx5_0/1 link_downed": [1, 2, "x"]}}',
        "9" * 20000,
    ],
)
def test_what_is_kept_and_damaged_is_told_once_and_replaced(node: Node, kept: str) -> None:
    assert found(node, "nic-errors")[0] is P
    (file,) = (node / "run").rglob("nic-errors.kept")
    file.write_text(kept.replace("{", f'{{"boot": "{cache.boot_id(NodeView(str(node.root)))}", ', 1))
    verdict, text = found(node, "nic-errors")
    assert verdict is P if kept in ("[]", "null") else verdict is U and "is ignored: it is" in text
    _sees_again(node)


def _sees_again(node: Node) -> None:
    assert found(node, "nic-errors")[0] is P
    assert found(node, "nic-ports")[0] is P
    port(node, "mlx5_0", "counters/link_downed", "77")
    assert found(node, "nic-errors")[0] is F
    port(node, "mlx5_0", "state", "1: DOWN")
    assert found(node, "nic-ports")[0] is F


def _emptied(file: Path) -> None:
    file.write_text("")


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _link(file: Path) -> None:
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _new_in_the_way(file: Path) -> None:
    """A half-written file of who was killed, which somebody exchanged for a FIFO besides."""
    file.write_text("{")
    os.mkfifo(f"{file}.new")


@pytest.mark.parametrize("spoil", [_emptied, _directory, _link, _fifo, _new_in_the_way])
@pytest.mark.parametrize("name", ["nic-ports", "nic-errors"])
def test_what_is_in_the_way_of_what_is_kept_is_told_once_and_replaced(
    node: Node, name: str, spoil: Callable[[Path], None]
) -> None:
    for each in ("nic-ports", "nic-errors"):
        assert found(node, each)[0] is P
    (file,) = (node / "run").rglob(f"{name}.kept")
    spoil(file)
    verdict, text = found(node, name)
    assert verdict is U and "is ignored: " in text
    assert found(node, name)[0] is P
    _sees_again(node)


def test_damaged_rates_of_ports_are_told_once_and_replaced(node: Node) -> None:
    assert found(node, "nic-ports")[0] is P
    (file,) = (node / "run").rglob("nic-ports.kept")
    for rates in ('"x"', '{"mlx5_0/1": "fast"}', "[1]"):
        file.write_text(f'{{"boot": "{cache.boot_id(NodeView(str(node.root)))}", "rates": {rates}}}')
        assert found(node, "nic-ports") == (U, "how ports were is ignored: it is damaged")
        assert found(node, "nic-ports")[0] is P


def test_many_looks_at_once_lose_nothing(node: Node) -> None:
    """As when many prologs start together: each look sees one more error than the one before it."""
    view = NodeView(str(node.root), {})
    counters.look(view, "test", {"a": 0}, 1e6)
    counts, ready = iter(range(1, 41)), threading.Barrier(8)
    lock = threading.Lock()

    def looks() -> None:
        ready.wait(30)
        for _ in range(5):
            with lock:
                count = next(counts)
            counters.look(view, "test", {f"b{count}": 1, "a": 0}, 1e6)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(looks) for _ in range(8)]:
            done.result(60)
    kept = counters.recall(view, "test")["counters"]
    assert set(kept) == {"a", *(f"b{count}" for count in range(1, 41))}


def test_what_others_could_write_is_not_believed(node: Node) -> None:
    assert found(node, "nic-errors")[0] is P
    (file,) = (node / "run").rglob("nic-errors.kept")
    file.chmod(0o666)
    verdict, text = found(node, "nic-errors")
    assert verdict is U and "not a file that only its owner" in text
    file.unlink()
    file.symlink_to("/etc/passwd")
    assert found(node, "nic-errors")[0] is U
    assert not file.is_symlink() and Path("/etc/passwd").read_text().startswith("root:")


def test_without_a_place_to_keep_them_counters_do_not_apply(node: Node) -> None:
    shutil.rmtree(node / "run")
    verdict, text = found(node, "nic-errors")
    assert verdict is N and text.startswith("there is nothing to compare with")
    assert found(node, "nic-ports") == (P, "8 of 8 ports are active")


# --- NICs of GPUs ---------------------------------------------------------------------------------------------------


def test_a_gpu_whose_nic_is_down_is_named(node: Node) -> None:
    assert found(node, "gpu-nics") == (P, "8 GPUs have an active NIC near them")
    port(node, "mlx5_3", "state", "1: DOWN")
    assert found(node, "gpu-nics") == (F, "mlx5_3, nearest to GPU 0000:61:00.0, has no active port")
    assert found(node, "nic-ports")[0] is F  # which looks at the same


def test_a_gpu_whose_nic_was_never_cabled_is_well(node: Node) -> None:
    port(node, "mlx5_3", "state", "1: DOWN")
    for _ in range(2):
        assert found(node, "gpu-nics") == (P, "7 GPUs have an active NIC near them")
        assert found(node, "nic-ports") == (P, "7 of 8 ports are active")
    assert found(node, "gpu-nics", nic_ports=("mlx5_3/1",))[0] is F
    port(node, "mlx5_4", "state", "1: DOWN")
    assert found(node, "gpu-nics")[0] is F


def test_a_node_may_have_fewer_nics_than_gpus(node: Node) -> None:
    """Those behind another bridge, and on another NUMA node, have none near them."""
    for index in range(1, 8):
        (node / f"{IB}/mlx5_{index}").unlink()
    verdict, text = found(node, "gpu-nics")
    assert (verdict, text) == (P, "4 GPUs have an active NIC near them")


def test_the_nic_next_to_each_gpu_is_learned_and_expected(node: Node) -> None:
    learn = CHECKS["gpu-nics"].learn
    assert learn is not None
    view = NodeView(str(node.root), {})
    learned = learn(CHECKS["gpu-nics"].gather(view, registry.defaults(CHECKS.values())))
    assert learned["gpu_nics"][:2] == ("0000:1b:00.0=mlx5_0", "0000:43:00.0=mlx5_1")
    assert len(learned["gpu_nics"]) == 8
    assert found(node, "gpu-nics", **learned)[0] is P
    assert found(node, "gpu-nics", gpu_nics=("0000:1B:00.0 = mlx5_4",)) == (F, "GPU 0000:1b:00.0 is not next to mlx5_4")


def _xml(pairs: list[tuple[str, str]]) -> str:
    """As Azure's files: bridges with made-up addresses."""
    bridges = "".join(
        f'<pci busid="ffff:ff:01.0" class="0x060400"><pci busid="{gpu}" class="0x030200"/>'
        f'<pci busid="{nic}" class="0x020700"/></pci>'
        for gpu, nic in pairs
    )
    return f'<system version="1"><cpu numaid="0">{bridges}</cpu></system>'


def test_a_file_replaces_the_tree(node: Node) -> None:
    """--ft-pci-topo-file: the first GPU next to the last NIC and so on."""
    nics = [f"0000:{nic}:00.0" for _, _, nic in node.recorded.SWITCHES]
    node.write("/topo.xml", _xml(list(zip(node.recorded.GPUS, reversed(nics), strict=True))))
    expect = {"pci_topo_file": "/topo.xml"}
    assert found(node, "gpu-nics", gpu_nics=("0000:1b:00.0=mlx5_7", "0000:df:00.0=mlx5_0"), **expect)[0] is P
    assert found(node, "gpu-nics", gpu_nics=("0000:1b:00.0=mlx5_0",), **expect)[0] is F
    node.write("/topo.xml", _xml([("0000:1b:00.0", "0000:dc:00.0")]))
    verdict, text = found(node, "gpu-nics", **expect)
    assert verdict is F and text.startswith("GPU 0000:43:00.0 has no NIC near it")


_LETTERS = "bcdefghijk"
BOMB = "".join(
    f'<!ENTITY {letter} "{(f"&{before};") * 10}">' for before, letter in zip(_LETTERS, _LETTERS[1:], strict=False)
)
BOMB = f'<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb">{BOMB}]><system>&k;</system>'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no XML"),
        ("<system>", "is no XML"),
        ("\x00\x01", "is no XML"),
        ('<?xml version="1.0" encoding="klingon"?><a/>', "is no XML"),
        ("<system/>", "has no pci element with a busid"),
        (f"<system>{' ' * pci.MAX_TOPOLOGY_BYTES}</system>", "is longer than"),
        (BOMB, "topology"),
    ],
)
def test_a_bad_file_is_a_sentence(node: Node, text: str, said: str) -> None:
    node.write("/topo.xml", text)
    verdict, sentence = found(node, "gpu-nics", pci_topo_file="/topo.xml")
    assert verdict is U and said in sentence, sentence
    assert found(node, "gpu-nics", pci_topo_file="/nowhere.xml")[0] is U


def test_deep_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "deep.xml"
    file.write_text("<a>" * 20000 + '<pci busid="0000:01:00.0"/>' + "</a>" * 20000)
    with pytest.raises(ValueError, match="is nested deeper than"):
        pci.topology(file)
