"""The one owner of yaml: reads documents, reads and writes the `fault_tolerance:` section of a file.

yaml is imported only when there is a file, so that `nvrx-run --help` stays fast.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from nvrx_slurm.errors import UsageError

SECTION_KEY = "fault_tolerance"
# Pure-Python YAML reads about 100 kB per second; a configuration is a few kB.
MAX_YAML_BYTES = 256 * 1024
_MOST_DEPTH = 50
_MOST_DIGITS = 64
_TEXT = "tag:yaml.org,2002:str"


class MissingSection(UsageError):
    """No file, or no section in it; --ft-ignore-missing-cfg goes on then."""


def read_section(path: str) -> tuple[str, Mapping[object, object]]:
    """(path of keys, content) of the only `fault_tolerance:` section, at any depth, of a file of at most 256 KiB.

    Raises UsageError: no such file or section (MissingSection), two sections, not UTF-8, not YAML, not a mapping.
    """
    sections = list(_sections(read_document(path, "--ft-cfg-path")))
    if not sections:
        raise MissingSection(
            f"{path} has no {SECTION_KEY}: section; add one, or remove --ft-cfg-path"
        )
    if len(sections) > 1:
        places = " and ".join(where for where, _ in sections[:2])
        raise UsageError(f"{path} has {len(sections)} {SECTION_KEY}: sections ({places}); keep one")
    where, section = sections[0]
    if section is None:
        return where, {}
    if not isinstance(section, Mapping):
        raise UsageError(f"{path}: {where} must be a mapping of names to values; indent its keys")
    return where, section


def write_section(path: str, plain: Mapping[str, object]) -> None:
    """Write a file that `read_section` reads. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(document_text({SECTION_KEY: dict(plain)}))


def document_text(plain: Mapping[str, object]) -> str:
    """Plain data as YAML, keys in their order."""
    import yaml

    return str(yaml.safe_dump(dict(plain), sort_keys=False, allow_unicode=True, width=100))


def _sections(document: object) -> Iterator[tuple[str, object]]:
    """(path of keys, value) of each `fault_tolerance` key; a part that anchors share is visited once."""
    todo: list[tuple[str, object]] = [("", document)]
    seen: set[int] = set()
    while todo:
        where, node = todo.pop()
        if not isinstance(node, (dict, list)) or id(node) in seen:
            continue
        seen.add(id(node))
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            place = f"{where}.{key}" if where else str(key)
            if key == SECTION_KEY:
                yield place, value
            else:
                todo.append((place, value))


def read_document(path: str, flag: str) -> object:
    """The one YAML document of a file of at most 256 KiB that the flag called `flag` named.

    Raises UsageError with file, line and what is wrong; MissingSection if there is no such file.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader that refuses a key given twice, which YAML forbids and PyYAML lets pass, and what takes long."""

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level > _MOST_DEPTH:
                raise yaml.MarkedYAMLError(
                    problem="it nests too deeply", problem_mark=self.get_mark()
                )
            super().fetch_flow_collection_start(token)

        def compose_scalar_node(self, anchor: Any) -> Any:
            node = super().compose_scalar_node(anchor)
            if len(node.value) > _MOST_DIGITS and node.tag != _TEXT:
                raise yaml.MarkedYAMLError(
                    problem="a number is too long", problem_mark=node.start_mark
                )
            return node

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) and key.value != "<<" else ""
                if name and name in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {name} is there twice", problem_mark=key.start_mark
                    )
                seen.add(name)
            return node

    text = _read_text(path, flag)
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        hint = "; use spaces instead of tabs" if "\\t" in str(error.problem) else ""
        raise UsageError(f"{path}{place}: not valid YAML: {error.problem}{hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _read_text(path: str, flag: str) -> str:
    try:
        # a FIFO: do not wait
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path} is not a regular file; correct {flag} or remove it")
            data = file.read(MAX_YAML_BYTES + 1)
    except FileNotFoundError:
        raise MissingSection(f"{path} does not exist; correct {flag} or remove it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read ({reason}); correct {flag} or remove it") from None
    if len(data) > MAX_YAML_BYTES:
        raise UsageError(f"{path} is larger than {MAX_YAML_BYTES // 1024} KiB; correct {flag}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
