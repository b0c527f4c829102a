"""How the suite is spread over processes (scripts/test)."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("one of its kind")
def test_pytest_xdist_knows_groups(request: pytest.FixtureRequest) -> None:
    """Seen in its name. Without groups each worker brings up a Slurm cluster, and the suite takes twice as long."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("only with --dist loadgroup")
    assert request.node.nodeid.endswith("@one of its kind"), "pytest-xdist does not group: install pytest<9.2"
