"""Where an exception was raised: its place says more than its words. From the table `places.txt`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from nvrx_slurm.core.attribution.raised import frames

# Exceptions of input and output, whose words alone do not tell with what.
_OF_IO = re.compile(
    r"(?:\w+\.)*(?:(?:EOF|OS|IO|BlockingIO|FileNotFound|Permission|Timeout|BrokenPipe|Operational|Connection\w*)Error"
    r"|UnpicklingError|timeout)\b"
)


class RaisedPlace(NamedTuple):
    """What a library works with, and what follows from that."""

    name: str
    rule: str  # of an error of input and output that no other rule knows; "" = none
    proves: frozenset[str]  # classes of which common words are enough here
    vetoes: frozenset[str]  # classes whose words mean something else here
    packages: tuple[str, ...]


def _places(table: str) -> Iterator[RaisedPlace]:
    for block in table.split("\n[")[1:]:
        head, _, packages = block.partition("]\n")
        name, _, rest = head.partition(": ")
        rule, proves, vetoes = (part.strip() for part in f" {rest}".split(";"))
        yield RaisedPlace(
            name,
            rule,
            frozenset(proves.split()),
            frozenset(vetoes.split()),
            tuple(packages.split()),
        )


with open(f"{__file__.removesuffix('.py')}.txt", encoding="utf-8") as file:
    PLACES = tuple(_places(file.read()))


def place_of(headline: str, traceback: str) -> RaisedPlace | None:
    """Where the exception was raised: by the innermost frames before the first of the user's code, else by the module
    of its type; None = in a place that is not known."""
    for frame, is_library in frames(traceback):
        if not is_library:
            break
        for one in PLACES:
            if any(_holds(frame, package) for package in one.packages):
                return one
    return next(
        (one for one in PLACES if headline.startswith(tuple(f"{name}." for name in one.packages))),
        None,
    )


def _holds(frame: str, package: str) -> bool:
    """Whether a frame ("FILE:LINE in FUNCTION") is of a package or a module."""
    return f"/{package}/" in frame or f"/{package}:" in frame or frame.startswith(package)


def is_of_io(headline: str) -> bool:
    """Whether the exception is about input and output, with anything."""
    return _OF_IO.match(headline) is not None
