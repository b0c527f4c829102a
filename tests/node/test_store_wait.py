"""Ranks that come to rank 0's store before it is there."""

import os

import pytest
from waits import WAIT_S

pytestmark = [pytest.mark.torch, pytest.mark.process]
EARLY = """
import socket
import torch.distributed as dist

fifo = os.path.join(os.environ["NVRX_TEST_GATES"], "refused")
connect = socket.create_connection

def tell_of_a_refusal(*args):
    try:
        return connect(*args)
    except ConnectionRefusedError:
        socket.create_connection = connect
        open(fifo, "w").close()
        raise

if RANK == 1:
    socket.create_connection = tell_of_a_refusal
else:
    open(fifo).close()
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("warm", ["auto", "off"])
def test_a_rank_looks_for_the_store_before_torch_does(rig, warm):
    os.mkfifo(rig.dir / "refused")
    one = rig.run(rig.script(EARLY), "--nproc-per-node=2", f"--ft-warm={warm}", "--ft-preload=torch")
    assert one.wait(WAIT_S) == 0
