"""The recorded node with its GPUs: checks run in one process of its own, on nvidia-ml-py and the stand-in of NVML."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

from standin import StandIn
from waits import WAIT_S

from nvrx_slurm.health.check import Verdict

_PROGRAM = """
import json, sys
from nvrx_slurm.health import registry
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.runner import examine
checks = registry.built_in()
for line in sys.stdin:
    name, root, env, expect, learns = json.loads(line)
    expected, learned = registry.defaults(checks.values()) | expect, {}
    found = examine(checks[name], NodeView(root, env), expected, learned if learns else None)
    print(json.dumps((*found, learned)), flush=True)
"""


class Examiner:
    """A process that does one check after the other."""

    def __init__(self, library):
        self.stand_in = StandIn(library, library / "examined")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.stand_in.env},
            text=True,
        )

    def ask(self, *question):
        """What it answers. Fails if it does not within a bound, or has died of it."""
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], f"no answer to {question[0]}"
        return json.loads(self.process.stdout.readline())

    def close(self):
        with self.process:
            self.process.kill()


class GpuNode:
    """A healthy node with 8 GPUs of 18 NVLinks each, until told otherwise."""

    def __init__(self, node, examiner):
        self.node = node
        self.examiner = examiner
        self.stand_in = examiner.stand_in
        Path(f"{self.stand_in.state}.met").unlink(missing_ok=True)
        addresses = node.recorded.GPUS
        node.write("/proc/2/comm", "kthreadd\n")  # not a container
        self._healthy = ["count 8", "links 18", "field208 0", "field215 0"]
        self._healthy += [f"bus.{index} 0x{address[5:7]}" for index, address in enumerate(addresses)]
        self.say()

    def say(self, *lines):
        """Healthy but for these facts (see tests/lib/standin.c)."""
        self.stand_in.say(*self._healthy, *lines)

    def found(self, check, env=None, /, **expect):
        verdict, text, _ = self.examiner.ask(check, str(self.node.root), env or {}, expect, False)
        assert text.isprintable() and text
        return Verdict(verdict), text

    def learned(self, check):
        return dict(self.examiner.ask(check, str(self.node.root), {}, {}, True)[2])

    def program(self, *args):
        """As Node.program, with this NVML."""
        return self.node.program(*args, env=self.stand_in.env)
