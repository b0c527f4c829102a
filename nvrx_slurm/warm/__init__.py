"""Warm starts: a template process imports modules once and forks workers that have them already.

`template.py` is the template's program, `start.py` starts it. Both run in the workers' interpreter without this package
on its path. The agent's side is `node.workers.launcher`; `core.preload` says which modules.
"""
