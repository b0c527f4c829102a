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
        "https://me:s3cr3t77@host/x", "Authorization: Basic s3cr3t77", "EndpointSuffix=a;AccountKey=s3cr3t77;b",
        "https://a/b?sp=r&sig=s3cr3t77&se=1", "https://b/c?X-Amz-Credential=s3cr3t77&X-Amz-Signature=s3cr3t77",
        "AZURE_STORAGE_KEY=s3cr3t77", "private_key: s3cr3t77", "wandb login s3cr3t77", '"client-key": "s3cr3t77"',
        "{'key': '" + 5 * "5ec2e777" + "'}", "'key': 'wandb_v1_s3cr3t77s3cr3t77'",
        "s3cr3t77s3cr3t77\ns3cr3t77==\n-----END RSA PRIVATE KEY-----\nstep 1", "M" * 50 + "s3cr3t77" + "/" * 6,
    ],
)  # fmt: skip
def test_secrets_stay(text: str) -> None:
    clean = Redactor().clean(text)
    assert "s3cr3t77" not in clean and "5ec2e777" not in clean


@pytest.mark.parametrize("unit", ["A", "token", "eyJ-", "a:", "--key ", "-----END ", "x-", "ab\n"])
def test_long_lines_take_no_time(unit: str) -> None:
    began = time.process_time()
    Redactor().clean(unit * (65536 // len(unit)))
    assert time.process_time() - began < 1.0
