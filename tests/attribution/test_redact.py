"""What never leaves the cluster with the lines that a language model is sent."""

from __future__ import annotations

import time

import pytest

from nvrx_slurm.attribution.redact import Redactor


@pytest.mark.parametrize(
    "text",
    [
        "X-Api-Key: s3cr3t77", "api-key=s3cr3t77", "--hf-token s3cr3t77 --steps 5", "--password s3cr3t77",
        "['train.py', '--wandb-token', 's3cr3t77']", "Cookie: session=s3cr3t77", "HF_TOKEN=s3cr3t77",
        "https://me:s3cr3t77@host/x", "Authorization: Basic s3cr3t77",
    ],
)  # fmt: skip
def test_secrets_stay(text: str) -> None:
    assert "s3cr3t77" not in Redactor().clean(text)


@pytest.mark.parametrize("unit", ["A", "token", "eyJ-", "a:", "--key "])
def test_long_lines_take_no_time(unit: str) -> None:
    began = time.process_time()
    Redactor().clean(unit * (65536 // len(unit)))
    assert time.process_time() - began < 1.0
