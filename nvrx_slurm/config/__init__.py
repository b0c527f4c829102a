"""The configuration: one frozen dataclass tree is the flags, the environment variables, the YAML keys and the docs.

`launch` and `ft` declare the settings; `kinds`, `values` and `rendezvous` read single values; `files` reads YAML;
`layers` merges flags, environment and files. `site` is the file of the health checks.
"""
