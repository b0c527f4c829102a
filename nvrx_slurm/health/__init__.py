"""Node health: small checks (gather, then judge), run in parallel under one deadline.

See docs/reference/health-checks.md.

`check` is the protocol, one module per family of checks, `registry` knows them all, `runner` runs them,
`policy` says which of them where and what a failure does, `report` shows what they found.
"""
