"""What never leaves the cluster with the lines that a language model is sent."""

from __future__ import annotations

import re
import time

import pytest

from nvrx_slurm.core.redact import Redactor

pytestmark = pytest.mark.fast


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


@pytest.mark.parametrize(
    "unit", ["A", "token", "eyJ-", "a:", "--key ", "-----END ", "-----BEGIN ", "ab\n", "1.", "://" + "x" * 50]
)
def test_long_lines_take_no_time(unit: str) -> None:
    began = time.process_time()
    Redactor(["u"], [f"n{i}" for i in range(10_000)]).clean(unit * (65536 // len(unit)))
    assert time.process_time() - began < 1.0


SECRETS = [
    "hf_abcdefghijklmnop", "sk-abcdefghij0123", "ghp_0123456789abcdef", "AKIAIOSFODNN7EXAMPLE", "nvapi-abcdefgh1234",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "hunter2-password",
]  # fmt: skip
LINES = """token {0} and key={1} git {2} aws {3} nv {4} jwt {5}
Authorization: Bearer {6}
db_password={6} "api_key": "{6}" --wandb-token={6}
https://joe:{6}@example.com/x
-----BEGIN RSA PRIVATE KEY-----
{6}
-----END RSA PRIVATE KEY-----
/home/joe/run.py on node17 (10.1.2.3) fe80:0:0:0:1:2:3:4 user joe
torch 2.13.0 step 12:34:56""".format(*SECRETS)


def test_secrets_and_names_do_not_leave() -> None:
    names = Redactor(["joe"], ["node17"])
    sent = names.clean(LINES)
    for secret in (*SECRETS, "joe", "node17", "10.1.2.3", "fe80"):
        assert secret not in sent, sent
    assert "torch 2.13.0 step 12:34:56" in sent
    alias = re.search(r"on (host-\d+) \((ip-\d+)\)", sent)
    assert alias is not None and names.restored(f"{alias[1]} at {alias[2]}") == "node17 at 10.1.2.3"
    assert names.clean("node17") == alias[1] and names.restored("host-99") == "host-99"
