"""A first site file, from the present state of a good node: `nvrx health init`."""

from __future__ import annotations

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy, registry, runner
from nvrx_slurm.health.check import NodeView, Verdict

DEADLINE_S = 30.0
# Services that are asked for while the site names none.
_SERVICES = (
    "slurmd",
    "munge",
    "sshd",
    "chronyd",
    "sssd",
    "openibd",
    "nvidia-persistenced",
    "nvidia-fabricmanager",
)
_HEAD = """\
# What nvrx health expects of this site's nodes.
# See docs/reference/health-checks.md; check it with: nvrx health run --config FILE
# Written from what {node} had, without what autofs has mounted; take out what may differ.
# Put all nodes that are alike into nodes (dgx[01-32]).
"""


def site_file(node: str = "", sysroot: str = "/") -> tuple[str, list[str]]:
    """(text of a site file with one group that holds `node`, sentences about checks that could not be read).

    To be called in a process without threads. Raises UsageError for a name that no host list can hold.
    """
    from nvrx_slurm.config.files import document_text
    from nvrx_slurm.slurm.nodelist import expand

    name = node or policy.node_name()
    if expand(name) != [name]:
        raise UsageError(f"--node {name}: must be the name of one node")
    checks = registry.built_in()
    expected = {**registry.defaults(checks.values()), "services": _SERVICES}
    learning = [check for check in checks.values() if check.learn]
    found = runner.run(learning, NodeView(sysroot), expected, DEADLINE_S, learns=True)
    notes = [
        f"{finding.check}: {finding.text}"
        for finding in found.findings
        if finding.verdict is Verdict.UNKNOWN
    ]
    expect = {key: value for key, value in sorted(found.learned.items()) if value}
    group = {"nodes": name, "expect": expect}
    return _HEAD.format(node=name) + document_text({"groups": {"nodes": group}}), notes
