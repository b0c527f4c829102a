"""Decisions about the merged log files: names, lines, index. Pure."""
