"""Which modules a template imports where the user names none."""

import pytest

from nvrx_slurm.core import preload

pytestmark = pytest.mark.fast


MAPS = """\
7f0a4c000000-7f0a4c021000 rw-p 00000000 00:00 0
7f0a50a00000-7f0a50c00000 r-xp 00000000 fd:00 12345 /usr/lib/python3/dist-packages/numpy/_core/_umath.cpython-311.so
7f0a51a00000-7f0a51c00000 r-xp 00000000 fd:00 12346 /opt/env/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so
7f0a52a00000-7f0a52c00000 r-xp 00000000 fd:00 12347 /opt/env/lib/python3.12/site-packages/scipy.libs/libopenblas.so
7f0a53a00000-7f0a53c00000 r--p 00000000 fd:00 12348 /data/pandas/table.bin
7f0a54a00000-7f0a54c00000 r--p 00000000 fd:00 12349 /opt/regex/lib/libz.so.1.2.13
7f0a55a00000-7f0a55c00000 r-xp 00000000 fd:00 12350 /opt/other/mytorch/lib/libmy.so
"""


def test_loaded_libraries():
    found, libraries = preload.loaded(MAPS)
    assert found == ("numpy", "torch", "torch._dynamo", "regex")
    assert len(libraries) == 5 and all(".so" in library for library in libraries)
    assert preload.loaded("") == preload.loaded("\0\xff garbage\n" * 1000) == ((), frozenset())


TORCH = ("torch",)
DYNAMO = ("torch", "torch._dynamo")
BESIDE = {
    "sets": "import os\ndef f(): os.environ['X'] = '1'",
    "pkg": "from .main import main",
    "pkg.main": "from ..pkg import deep",
    "pkg.deep": "import torch\noptim = 1",
    "late": "import torch\ndef f(): os.environ['X'] = '1'",
    "early": "def f(): os.environ['X'] = '1'\nf()\nimport torch",
    "accelerate": "import json",
    "clean": "import json",
    "ring": "import ring",
}


@pytest.mark.parametrize(
    "source, nproc, first, later",
    [
        ("import torch", 2, TORCH, DYNAMO),
        ("import torch\no = torch.optim.AdamW", 2, DYNAMO, DYNAMO),
        ("import torch\no = torch.optim.AdamW", 1, TORCH, DYNAMO),
        ("'text'\nimport os, numpy\nX = g()\nimport torch", 2, ("numpy", "torch"), ("numpy", *DYNAMO)),
        ("import pandas, torch", 2, TORCH, (*DYNAMO, "pandas")),
        ("import lightning", 2, DYNAMO, (*DYNAMO, "torchmetrics")),
        ("T = now()\nprint(T)\nfrom transformers import A, B", 1, TORCH, (*DYNAMO, "transformers:A,B")),
        ("if X:\n  try:\n    import torch\n  except ImportError: pass", 2, TORCH, DYNAMO),
        ("def train():\n  import torch", 2, TORCH, DYNAMO),
        ("import os\nint(os.environ['RANK'])\nimport torch", 2, TORCH, DYNAMO),
        ("import sys\nsys.path[:0] = ['x']\nimport torch", 2, TORCH, DYNAMO),
        ("import clean, ring, torch", 2, TORCH, DYNAMO),
        ("from pkg.main import main", 2, DYNAMO, DYNAMO),
        # A variable is set before, or may be.
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", 2, (), DYNAMO),
        ("import os\nos.environ.setdefault('X', '4')\nimport torch", 2, (), DYNAMO),
        ("from os import environ, putenv\ndel environ['X']\nputenv('Y', '1')\nimport torch", 2, (), DYNAMO),
        ("import dotenv\ndotenv.load_dotenv()\nimport torch", 2, (), DYNAMO),
        ("import sets, torch", 2, (), DYNAMO),
        ("import early", 2, (), DYNAMO),
        ("def f(): os.environ['X'] = '1'\nf()\nimport torch", 2, (), DYNAMO),
        ("def f(): os.environ['X'] = '1'\nimport torch\nf()", 2, TORCH, DYNAMO),
        ("import late", 2, TORCH, DYNAMO),
        ("import os\ndef main():\n  os.environ['X'] = '1'\n  import torch", 2, (), DYNAMO),
        # After torch: before the first optimizer.
        ("import torch, os\nos.environ['X'] = '1'\no = torch.optim.AdamW", 2, TORCH, DYNAMO),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import numpy", 2, (), ()),
        ("import numpy, pandas", 2, (), ()),
        ("import os", 2, (), ()),
        ("#!/bin/sh\nexec python train.py", 2, (), ()),
        ("import torch\0", 2, (), ()),
        ("(" * 5000, 2, (), ()),
    ],
)
def test_what_workers_wait_for(source, nproc, first, later):
    found = preload.guess(source, nproc, lambda module: BESIDE.get(module, ""))
    assert (found.first, found.later) == (first, later)


@pytest.mark.parametrize(("nproc", "more"), [(2, ("transformers:A,B", "accelerate")), (1, ())])
def test_several_workers_wait_for_what_they_take_from_libraries_above_torch(nproc, more):
    source = "from transformers import A, B\nimport accelerate"
    assert preload.guess(source, nproc, lambda module: "").next == more


@pytest.mark.parametrize(
    ("source", "scout"),
    [
        ("import torch, lightning", ""),
        ("import lightning.pytorch, torch", "lightning.pytorch"),
        ("from pkg.main import main", ""),
        ("import accelerate", ""),  # a module beside the script
        ("import os\nos.environ['X'] = '1'\nimport lightning", ""),
        ("import os", ""),
    ],
)
def test_a_package_that_imports_torch_for_the_script_is_asked_what_it_sets_before(source, scout):
    assert preload.guess(source, 1, lambda module: BESIDE.get(module, "")).scout == scout


def learned(*told):
    found = preload.Learned()
    for one in told:
        found.imported(*one)
    return found


def test_a_template_imports_under_the_variables_that_ranks_had():
    four, off = {"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS": "4", "TORCH_COMPILE_DISABLE": "1"}
    told = [(rank, *one) for rank in (0, 1) for one in (("torch", four), ("torch._dynamo", off), ("scipy", {}))]
    found = learned(*told)
    assert found.modules() == (("torch", four), ("torch._dynamo", off), ("scipy", {}))
    found.found(("transformers:Trainer", "triton"))
    assert found.modules()[3:] == (("triton", {}), ("transformers:Trainer", {}))


def test_what_differs_from_rank_to_rank_is_left_out_with_what_needs_it():
    found = learned((0, "torch", {"X": "0"}), (1, "torch", {"X": "1"}), (0, "numpy", {}), (0, "torchvision", {}))
    assert found.modules() == (("numpy", {}),) and [*found.by_rank()] == [("X",)]
    found = learned((0, "torch", {}), (0, "torch._dynamo", {"X": "0"}), (1, "torch._dynamo", {"X": "1"}))
    assert found.modules() == (("torch", {}),)


def test_what_differs_from_start_to_start_is_left_out():
    found = learned((0, "torch", {}), (0, "torch._dynamo", {}))
    for _ in range(preload.MAX_MISSES):
        assert found.modules() == (("torch", {}), ("torch._dynamo", {}))
        for _ in range(2):  # both ranks of a start
            found.missed("torch._dynamo")
        found.began()
    assert found.modules() == (("torch", {}),)
    for _ in range(preload.MAX_MISSES):
        found.missed("numpy")
        found.began()
    assert found.modules() == ()


def test_a_node_without_ranks_takes_what_others_import():
    found = preload.Learned()
    found.found(("numpy", *DYNAMO))
    told = (("torch", {"X": "1"}), ("torch._dynamo", {"X": "2"}))
    for hint in (told[:1], told):
        found.hinted(hint)
        assert found.modules() == hint
    found.began()
    found.hinted(told[:1])
    found.imported(0, "torch", {"X": "3"})
    assert found.modules() == (("numpy", {"X": "3"}), ("torch", {"X": "3"}), told[1])


def test_named_modules_are_imported_in_their_order():
    found = preload.Learned(("mine", "torch"))
    found.imported(0, "torch", {"X": "1"})
    found.imported(0, "scipy", {})
    assert found.modules() == (("mine", {}), ("torch", {"X": "1"}))
