"""How a setting is declared: one `setting(...)` in a dataclass is its flag, its variable, its YAML key and its docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar

from nvrx_slurm.config.kinds import BOOL, Kind, did_you_mean, optional, shorten
from nvrx_slurm.errors import UsageError

MONITORING = "Rank monitoring"  # the group whose settings ranks get


@dataclass(frozen=True)
class Declaration:
    """One field of a section; `setting()` declares it."""

    section: str  # "launch" or "ft", as in `Config`; "submit"
    name: str  # field name; for "ft" also the YAML key
    kind: Kind
    default: Any
    help: str
    group: str
    flags: tuple[str, ...]  # spellings with dashes, the main one first; () = environment only
    env: tuple[str, ...]  # the first one that is set counts
    form: str = "value"  # "value", "switch" (takes no value) or "repeat"
    no_effect: str = ""  # why this accepted value changes nothing

    @property
    def key(self) -> str:
        """Name in `resolve(flags=...)` and in tables: torchrun's and ft_launcher's argparse name."""
        return f"ft_{self.name}" if self.section == "ft" else self.name


def shown(item: Declaration, value: Any) -> str:
    """A value as one line of text, as it could be given in a flag ("" = an empty value)."""
    plain = item.kind.show(value)
    if plain is None:
        return "none"
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, Mapping):
        return ",".join(
            f"{name}:{'none' if limit is None else format(limit, 'g')}"
            for name, limit in plain.items()
        )
    return format(plain, ".10g") if isinstance(plain, float) else str(plain)


def setting(kind: Kind, default: Any, help: str, **more: Any) -> Any:
    """Declare a field.

    `more`: begins = the group of this field and of those that follow it; form, no_effect (see `Declaration`);
    flag = the main spelling where it does not follow from the name, "" for none; aliases = further spellings;
    env = "nvrx", "pet" (torchrun's) or "both".
    """
    metadata = {"kind": kind, "help": help, **more}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def switch(help: str, **more: Any) -> Any:
    """Declare a flag without a value."""
    return setting(BOOL, False, help, form="switch", **more)


def maybe(kind: Kind, help: str, **more: Any) -> Any:
    """Declare a field that is None until it is given."""
    return setting(optional(kind), None, help, **more)


def ignored(kind: Kind, default: Any, why: str, **more: Any) -> Any:
    """Declare a field that is taken for the sake of torchrun or ft_launcher and changes nothing."""
    return setting(kind, default, f"Accepted for compatibility: {why}.", no_effect=why, **more)


class Section:
    """Base of the dataclasses: every value passes its parser, however it is given. Raises UsageError."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            object.__setattr__(self, item.name, self._parsed(item, getattr(self, item.name)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Assigns to a field, where the section is not frozen."""
        if name in vars(self):  # else __post_init__ parses it
            (item,) = (item for item in settings_of(type(self)) if item.name == name)
            value = self._parsed(item, value)
        elif name not in (known := type(self).__dataclass_fields__):  # type: ignore[attr-defined]
            near = did_you_mean(name, known)
            raise UsageError(f"{name} is not a field of {type(self).__name__}{near}")
        object.__setattr__(self, name, value)

    def _parsed(self, item: Declaration, raw: Any) -> Any:
        try:
            return item.kind.parse(raw)
        except ValueError as error:
            raise UsageError(f"{type(self).__name__}: {item.name}={raw!r} {error}") from None


def by_group(settings: Iterable[Declaration]) -> dict[str, list[Declaration]]:
    """The settings under the headings of --help and docs/reference/configuration.md."""
    found: dict[str, list[Declaration]] = {}
    for item in settings:
        found.setdefault(item.group, []).append(item)
    return found


def settings_of(cls: type[Section]) -> tuple[Declaration, ...]:
    """The settings of one section, in order of declaration."""
    known: Any = _settings_of  # mypy takes a class of dataclasses for something that has no hash
    found: tuple[Declaration, ...] = known(cls)
    return found


@cache
def _settings_of(cls: type[Section]) -> tuple[Declaration, ...]:
    found = []
    group = ""
    for f in fields(cls):  # type: ignore[arg-type]
        more = dict(f.metadata)
        group = more.pop("begins", group)
        found.append(_declaration(cls.section, group, f, more))
    return tuple(found)


def _declaration(section: str, group: str, f: Any, more: dict[str, Any]) -> Declaration:
    key = f"ft_{f.name}" if section == "ft" else f.name
    main = more.pop("flag", "--" + key.replace("_", "-"))
    ours, pet = (
        f"NVRX_{'SUBMIT_' if section == 'submit' else ''}{key.upper()}",
        f"PET_{key.upper()}",
    )
    env = {"nvrx": (ours,), "pet": (pet,), "both": (ours, pet)}[more.pop("env", "nvrx")]
    return Declaration(
        section=section,
        name=f.name,
        default=f.default if f.default is not MISSING else f.default_factory(),
        group=group,
        flags=tuple(filter(None, (main, *more.pop("aliases", ())))),
        env=env,
        **more,
    )


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    layer: str  # "flag", "environment", "yaml" or "default"
    name: str = ""  # the flag, the variable, or "FILE: path.of.keys"

    def __str__(self) -> str:
        return (
            f"{self.layer} {self.name}" if self.layer == "environment" else self.name or self.layer
        )

    def with_value(self, raw: object) -> str:
        """Begins an error sentence: `--nnodes '3:2'`, `PET_NNODES='3:2'`, `ft.yaml: fault_tolerance.x = 'y'`."""
        joint = {"flag": " ", "environment": "="}.get(self.layer, " = ")
        return f"{self.name}{joint}{shorten(raw)}"


Layer = dict[str, tuple[Any, Origin]]
"""Raw values of one source and where each stood."""


def parsed(item: Declaration, raw: object, origin: Origin) -> Any:
    """The value of `raw`, or a UsageError that begins with its origin."""
    try:
        return item.kind.parse(raw)
    except ValueError as error:
        raise UsageError(f"{origin.with_value(raw)}: {error}") from None
