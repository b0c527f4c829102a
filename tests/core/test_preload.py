"""Which modules a template imports where the user names none."""

from __future__ import annotations

import pytest

from nvrx_slurm.core import preload

MAPS = """\
7f0a4c000000-7f0a4c021000 rw-p 00000000 00:00 0
7f0a50a00000-7f0a50c00000 r-xp 00000000 fd:00 12345 /usr/lib/python3/dist-packages/numpy/_core/_umath.cpython-311.so
7f0a51a00000-7f0a51c00000 r-xp 00000000 fd:00 12346 /opt/env/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so
7f0a52a00000-7f0a52c00000 r-xp 00000000 fd:00 12347 /opt/env/lib/python3.12/site-packages/scipy.libs/libopenblas.so
7f0a53a00000-7f0a53c00000 r--p 00000000 fd:00 12348 /data/pandas/table.bin
7f0a54a00000-7f0a54c00000 r--p 00000000 fd:00 12349 /opt/regex/lib/libz.so.1.2.13
7f0a55a00000-7f0a55c00000 r-xp 00000000 fd:00 12350 /opt/other/mytorch/lib/libmy.so
"""


def test_loaded_libraries() -> None:
    found, libraries = preload.loaded(MAPS)
    assert found == ("numpy", "torch", "regex", "torch._dynamo")
    assert len(libraries) == 5 and all(".so" in library for library in libraries)
    assert preload.loaded("") == preload.loaded("\0\xff garbage\n" * 1000) == ((), frozenset())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch", ("torch", "torch._dynamo")),
        (
            "def f():\n    from torch.nn import functional as F\nimport numpy as np, os",
            ("numpy", "torch", "torch._dynamo"),
        ),
        ("import pandas.io", ("pandas",)),
        ("from . import torch\nfrom .torch import x\nimport mytorch\n# import numpy\n'import scipy'", ()),
        ("import os", ()),
        ("", ()),
        ("#!/bin/sh\nexec python train.py", ()),
        ("import torch\0", ()),
        ("(" * 5000, ()),
    ],
)
def test_imports_of_a_script(source: str, found: tuple[str, ...]) -> None:
    assert preload.imported(source) == found


DYNAMO = ("torch", "torch._dynamo")


@pytest.mark.parametrize(
    ("source", "nproc", "first", "later"),
    [
        ("import torch", 2, ("torch",), DYNAMO),
        ("import torch\no = torch.optim.AdamW", 2, DYNAMO, DYNAMO),
        ("import torch\no = torch.optim.AdamW", 1, ("torch",), DYNAMO),
        ("'text'\nimport os, numpy\nX = 'a', 1\ndef f(): g()\nimport torch", 2, ("numpy", "torch"), ("numpy", *DYNAMO)),
        ("import pandas, torch", 2, ("torch",), (*DYNAMO[:1], "pandas", DYNAMO[1])),
        ("import lightning", 2, DYNAMO, DYNAMO),
        ("from transformers import A, B", 1, ("torch",), (*DYNAMO, "transformers:A,B")),
        ("if X:\n  try:\n    import torch\n  except ImportError: pass", 2, ("torch",), DYNAMO),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch", 2, (), ()),
        ("def train():\n  import torch", 2, (), ()),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", 2, (), ()),
        ("import sys\nsys.path[:0] = ['x']\nimport torch", 2, (), ()),
        ("import sys\nX = sys.path.pop()\nimport torch", 2, (), ()),
        ("import setup\nsetup.run()\nimport torch", 2, (), ()),
        ("import beside, torch", 2, (), ()),
        ("import torch, beside", 2, (), ()),
        ("import torch\nimport beside", 2, ("torch",), DYNAMO),
        ("import unsloth\nfrom transformers import A", 2, (), ()),
        ("import torch\nimport unsloth\nfrom transformers import A", 2, ("torch",), DYNAMO),
        ("import numpy, pandas", 2, (), ()),
        ("torch = (", 2, (), ()),
    ],
)
def test_what_workers_wait_for(source: str, nproc: int, first: tuple[str, ...], later: tuple[str, ...]) -> None:
    assert preload.at_start(source, nproc, {"beside"}.__contains__) == (first, later)
