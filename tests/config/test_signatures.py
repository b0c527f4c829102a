"""The file with rules of a site: what it may hold, and how a mistake is told."""

import pytest

from nvrx_slurm.config.signatures import read_signatures
from nvrx_slurm.errors import UsageError
from nvrx_slurm.types import Blame, Confidence, LineRole, Remedy

pytestmark = pytest.mark.fast


RULE = """signatures:
  - name: fabric-brownout
    texts: ["Fabric manager: brownout on * port"]
    class: network
    blame: network
    advice: Open a ticket.
"""


def test_a_rule(tmp_path):
    file = tmp_path / "rules.yaml"
    file.write_text(RULE)
    (rule,) = read_signatures(str(file))
    assert (rule.name, rule.topic, rule.texts) == (
        "fabric-brownout",
        "network",
        ("fabric manager: brownout on * port",),
    )
    assert (rule.role, rule.blame, rule.confidence) == (LineRole.CAUSE, Blame.NETWORK, Confidence.LIKELY)
    assert (rule.remedy, rule.advice, rule.printed, rule.pattern) == (Remedy.RESTART, "Open a ticket.", True, "")


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("signatures", "rules", "signatures:"),
        ("fabric-brownout", "Fabric", "lower-case"),
        ("fabric-brownout", "gpu-ecc", "taken"),
        ('["Fabric manager: brownout on * port"]', '["*"]', "texts"),
        ('["Fabric manager: brownout on * port"]', "[7]", "texts"),
        ("blame: network", "blame: moon", "must be user or node"),
        ("blame: network", "pattern: (a+)+", "is not a key"),
        ("Open a ticket.", "x" * 201, "advice"),
        ("Open a ticket.", "go\n    where: moon", "where must be"),
    ],
)
def test_a_mistake_is_told_with_its_rule(tmp_path, old, new, told):
    file = tmp_path / "rules.yaml"
    file.write_text(RULE.replace(old, new))
    with pytest.raises(UsageError, match="rules.yaml") as error:
        read_signatures(str(file))
    assert told in str(error.value)
