"""What a link of a chain tells the next one."""

import pytest

from nvrx_slurm.cli.chain import Chain, limits
from nvrx_slurm.config.layers import resolve
from nvrx_slurm.core.chain import ChainLink, Next, decide
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.env import SlurmContext

pytestmark = pytest.mark.fast


JOB = "JobId=8 JobState=PENDING ExitCode=0:0 Partition=main NumNodes={wanted} ExcNodeList=n1{more}"
NODES = "\n".join(f"NodeName=n{number} State=IDLE Partitions={name}" for number, name in enumerate("aaaab", 1))


@pytest.fixture
def exclude(monkeypatch, tmp_path):
    """Hands nodes on to job 8 of a cluster, as its scontrol shows both; what scontrol was told, and the sentences."""

    def ask(job, nodes, names):
        answers = f"case $2 in job) echo '{job}';; node) echo '{nodes}';; *) echo $* >> {tmp_path}/told;; esac"
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answers}\n")
        (tmp_path / "scontrol").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        lines = []
        Chain(resolve({}, {}).config, SlurmContext(7, "7"), Slurm(), lines.append)._exclude(8, names)
        told = tmp_path / "told"
        return told.read_text() if told.exists() else "", lines

    return ask


@pytest.mark.parametrize(
    "wanted, more, excluded, said",
    [
        (2, "", "n1,n2", "does not get n2"),
        (3, "", "", "may get n2 again"),  # n5 is in another partition
        (2, " Reservation=mine", "", "may get n2 again"),
    ],
)
def test_an_excluded_node_is_excluded_unless_the_next_link_needs_it(exclude, wanted, more, excluded, said):
    job = JOB.replace("main", "a").format(wanted=wanted, more=more)
    told, lines = exclude(job, NODES, ["n2", "n9"])
    assert told == (f"update JobId=8 ExcNodeList={excluded}\n" * bool(excluded))
    assert len(lines) == 1 and said in lines[0]


def test_at_most_64_nodes_are_handed_on(exclude):
    names = [f"n{number}" for number in range(2, 102)]
    nodes = "\n".join(f"NodeName={name} State=IDLE Partitions=a" for name in names)
    told, lines = exclude(JOB.replace("main", "a").format(wanted=2, more=""), nodes, names[:80])
    assert told == f"update JobId=8 ExcNodeList={','.join(['n1', *names[:64]])}\n"
    assert len(lines) == 2 and "may get n66, n67" in lines[1]


def test_a_chain_of_one_job_stops_its_ranks_before_the_time_limit():
    assert resolve({}, {}).config.stop_before_end_s == 0.0
    assert resolve({"until_done": True}, {}).config.stop_before_end_s > 0.0


def test_the_users_code_for_no_restart_ends_a_chain():
    config = resolve({"ft_no_restart_exit_code": 77}, {}).config
    assert decide([ChainLink(77, 0.0)], limits(config), 0.0).next is Next.END
