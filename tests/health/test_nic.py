"""NICs: ports, and counters that start anew."""

import shutil

import pytest
from recorded import F, N, P, U

from nvrx_slurm.health import kept
from nvrx_slurm.health.checks import nic

pytestmark = pytest.mark.process


IB = "/sys/class/infiniband"
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def port(node, nic, file, text):
    node.write(f"{IB}/{nic}/ports/1/{file}", f"{text}\n")


def test_a_port_that_was_active_since_boot_must_be(dgx):
    port(dgx, "mlx5_7", "state", "1: DOWN")  # never in use
    assert dgx.found("nic-ports") == (P, "7 of 8 ports are active")
    port(dgx, "mlx5_3", "state", "1: DOWN")
    port(dgx, "mlx5_3", "phys_state", "3: Disabled")
    for _ in range(2):  # also at the next look
        assert dgx.found("nic-ports") == (F, "mlx5_3/1 is DOWN, Disabled")
    dgx.remove(f"{IB}/mlx5_2/ports/1")
    assert dgx.found("nic-ports") == (F, "mlx5_2/1 is not there, mlx5_3/1 is DOWN, Disabled")
    dgx.write(BOOT_ID, "another\n")
    assert dgx.found("nic-ports")[0] is P


def test_the_ports_that_the_site_names_must_be_active(dgx, monkeypatch):
    monkeypatch.setattr(nic, "_SETTLE_S", 0.5)
    port(dgx, "mlx5_3", "state", "2: INIT")
    assert dgx.found("nic-ports", nic_ports=("mlx5_0/1", "mlx5_3/1")) == (F, "mlx5_3/1 is INIT, LinkUp")
    assert dgx.found("nic-ports", nic_ports=("mlx5_0/1", "mlx5_0/2")) == (F, "mlx5_0/2 is not there")
    assert dgx.found("nic-ports", nic_ports=("mlx5_0/1",))[0] is P


def test_a_port_must_be_as_fast_as_it_was_and_as_the_site_says(dgx):
    assert dgx.found("nic-ports", nic_rate_gbps=400)[0] is P
    port(dgx, "mlx5_1", "rate", "100 Gb/sec (1X NDR)")
    assert dgx.found("nic-ports") == (F, "mlx5_1/1 runs at 100 instead of 400 Gb/s")
    port(dgx, "mlx5_1", "rate", "400 Gb/sec (4X NDR)")
    assert dgx.found("nic-ports", nic_rate_gbps=800)[0] is F


def test_junk_in_a_state_is_unknown(dgx):
    assert dgx.found("nic-ports")[0] is P
    for junk in ("", "4: ACTIVELY", "\x00\x01"):
        port(dgx, "mlx5_1", "state", junk)
        verdict, text = dgx.found("nic-ports")
        assert verdict is U and "infiniband/mlx5_1/ports/1/state holds " in text


def test_a_port_of_the_site_fails_also_where_nothing_can_be_kept(dgx):
    directory = dgx / "run/nvrx-health"
    directory.mkdir()
    directory.chmod(0o777)  # its files cannot be trusted
    port(dgx, "mlx5_3", "state", "1: DOWN")
    assert dgx.found("nic-ports", nic_ports=("mlx5_3/1",)) == (F, "mlx5_3/1 is DOWN, LinkUp")
    assert dgx.found("nic-ports")[0] is P and list(directory.iterdir()) == []
    verdict, text = dgx.found("nic-errors")
    assert verdict is U and "only its owner" in text
    shutil.rmtree(dgx / "run")
    assert dgx.found("nic-ports", nic_ports=("mlx5_3/1",))[0] is F
    assert dgx.found("nic-errors")[0] is N


def test_no_infiniband_does_not_apply_and_unreadable_is_unknown(dgx):
    dgx.remove(f"{IB}/mlx5_3/ports/1/state")
    assert dgx.found("nic-ports")[0] is U
    dgx.remove(IB)
    for name in ("nic-ports", "nic-errors"):
        assert dgx.found(name)[0] is N


def test_files_elsewhere_by_template(dgx):
    """--ft-link-state-path-template and --ft-link-down-path-template."""
    templates = {"link_state_path": "/ib/{nic}/state", "link_downed_path": "/ib/{nic}/downs"}
    for states, downs, verdict in (("4: ACTIVE", 3, P), ("1: DOWN", 4, F), ("junk", "junk", U)):
        for index in range(8):
            dgx.write(f"/ib/mlx5_{index}/state", f"{states}\n")
            dgx.write(f"/ib/mlx5_{index}/downs", f"{downs}\n")
        for name in ("nic-ports", "nic-errors"):
            assert dgx.found(name, **templates)[0] is verdict


def test_ports_are_learned(dgx):
    port(dgx, "mlx5_7", "state", "1: DOWN")
    names = tuple(f"mlx5_{index}/1" for index in range(7))
    assert dgx.learned("nic-ports") == {"nic_ports": names, "nic_rate_gbps": 400.0}
    port(dgx, "mlx5_0", "rate", "junk")
    assert dgx.learned("nic-ports") == {"nic_ports": names}


def _looks(monkeypatch, before_each):
    """The waits for another look."""
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        before_each()

    monkeypatch.setattr(nic.time, "sleep", sleep)
    return waits


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED"])
def test_a_subnet_manager_that_has_just_started_is_waited_for(dgx, monkeypatch, state):
    names = [f"mlx5_{n}" for n in range(7)]
    port(dgx, "mlx5_7", "state", "2: INIT")  # was never active, and is not waited for
    assert dgx.found("nic-ports")[0] is P
    waits = _looks(monkeypatch, lambda: [port(dgx, each, "state", "4: ACTIVE") for each in names] and None)
    for each in names:
        port(dgx, each, "state", state)
    assert dgx.found("nic-ports")[0] is P and len(waits) == 1
    assert dgx.found("nic-ports")[0] is P and len(waits) == 1, "waited for a port that is not wanted"


@pytest.mark.parametrize("file, text", [("state", "1: DOWN"), ("phys_state", "2: Polling"), ("phys_state", "")])
def test_a_port_whose_link_is_down_fails_at_once(dgx, monkeypatch, file, text):
    assert dgx.found("nic-ports")[0] is P
    waits = _looks(monkeypatch, lambda: None)
    for name in ("mlx5_2", "mlx5_3"):  # these would be waited for
        port(dgx, name, "state", "2: INIT")
    port(dgx, "mlx5_3", file, text)
    assert dgx.found("nic-ports")[0] is F and not waits


def test_a_link_that_went_down_counts_for_an_hour(dgx, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(kept, "now_s", lambda: now_s[0])
    port(dgx, "mlx5_2", "counters/link_downed", "7")
    assert dgx.found("nic-errors") == (P, "0 errors lately")  # those before the first look do not count
    port(dgx, "mlx5_2", "counters/link_downed", "9")
    for at_s in (1060.0, 1120.0, 4660.0):
        now_s[0] = at_s
        assert dgx.found("nic-errors") == (F, "the link of mlx5_2/1 went down 2 times")
    assert dgx.found("nic-errors", nic_link_downed_max=2)[0] is P
    now_s[0] = 4661.0
    assert dgx.found("nic-errors")[0] is P
    port(dgx, "mlx5_2", "counters/link_downed", "0")  # reset
    assert dgx.found("nic-errors")[0] is P
    port(dgx, "mlx5_2", "counters/link_downed", "1")
    assert dgx.found("nic-errors") == (F, "the link of mlx5_2/1 went down 1 times")


def test_many_errors_fail_and_a_counter_that_goes_back_does_not(dgx):
    for count, verdict in (("5000", P), ("4999", P), ("5999", P), ("6000", F)):
        port(dgx, "mlx5_2", "counters/symbol_error", count)
        assert dgx.found("nic-errors")[0] is verdict, count
    assert dgx.found("nic-errors") == (F, "mlx5_2/1 counted 1001 x symbol_error")
    assert dgx.found("nic-errors", nic_errors_max=5000)[0] is P
