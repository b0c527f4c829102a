"""The configuration: one dataclass tree is the flags, the environment variables, the YAML keys and the docs.

`launch`, `ft`, `ft_logs` and `submit` declare the settings; `settings` says what a setting is. `kinds`
and `values` read single values; `files` reads YAML; `layers` merges flags, environment and files. `other_launchers`
has the flags that are not here. `site` is the file of the health checks, `nvhcd` that of the node health service.
"""
