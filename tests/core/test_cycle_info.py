"""Files of --ft-cycle-info-dir: pure."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.logs.cycle_info import compressed
from nvrx_slurm.slurm.nodelist import expand

LISTS = ("n[1-3]", "n[08-11]", "a,b", "n3,n1", "n9,n10", "r1n[1-2],r2n[1-2],x", "")


@pytest.mark.parametrize("text", LISTS)
def test_lists_of_hosts_keep_their_order_and_slurm_reads_them(text: str) -> None:
    hosts = expand(text)
    assert expand(compressed(hosts)) == hosts
    assert len(compressed(hosts)) <= len(text)
