"""The merged log files: a shipper on each node reads what its ranks wrote, an aggregator appends it to one file.

Two programs of their own. Ranks write their own files and never wait for either. See docs/explanation/merged-logs.md.
"""
