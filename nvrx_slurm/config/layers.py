"""Merges flags > environment > YAML > defaults, with the origin of each value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.config.files import MissingSection
from nvrx_slurm.config.ft import FaultToleranceConfig, yaml_layer
from nvrx_slurm.config.kinds import did_you_mean, nearest
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.settings import Declaration, Layer, Origin, parsed, settings_of
from nvrx_slurm.errors import UsageError

_NEAR = 0.8  # of 1: users and other programs have NVRX_ variables, too
_NO_SETTINGS = ("NVRX_LOG_LEVEL",)  # variables of this package that are near a setting


# with --until-done: for the ranks to end and Slurm to be asked, before Slurm ends the job
_REQUEUE_S = 30.0


@dataclass(frozen=True)
class Config:
    """Everything `nvrx-run` was told. Raises UsageError for settings that contradict each other."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ft: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)

    def __post_init__(self) -> None:
        self.launch.check()
        self.ft.check()

    @property
    def stop_before_end_s(self) -> float:
        """How long before the time limit the ranks are stopped; 0 = left to Slurm."""
        requeue_s = min(_REQUEUE_S, self.ft.warn_before_end / 2 or _REQUEUE_S)
        return self.ft.stop_before_end or (requeue_s if self.launch.until_done else 0.0)


SETTINGS: dict[str, Declaration] = {
    s.key: s for cls in (LaunchConfig, FaultToleranceConfig) for s in settings_of(cls)
}


@dataclass(frozen=True)
class Resolved:
    """The configuration, where each value came from (by `Declaration.key`), and sentences worth logging once."""

    config: Config
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()


def resolve(flags: Mapping[str, object], environ: Mapping[str, str] | None = None) -> Resolved:
    """Merge the layers: flags > environment > YAML > defaults.

    `flags`: by `Declaration.key` (`nnodes`, `ft_rank_heartbeat_timeout`), as text or typed; None = not given.
    `environ`: default `os.environ`; an empty variable counts as unset. Raises UsageError with one sentence.
    """
    environ = os.environ if environ is None else environ
    layers = [_flag_layer(flags), _environment_layer(environ)]
    notes = list(_misspelt(environ))
    path, _ = _pick(SETTINGS["ft_cfg_path"], layers)
    if path is not None:
        tolerant, _ = _pick(SETTINGS["ft_ignore_missing_cfg"], layers)
        layers.append(_yaml_for_launch(path, tolerant, notes))
    values: dict[str, dict[str, Any]] = {"launch": {}, "ft": {}}
    origins: dict[str, Origin] = {}
    for item in SETTINGS.values():
        values[item.section][item.name], origins[item.key] = _pick(item, layers)
    config = Config(LaunchConfig(**values["launch"]), FaultToleranceConfig(**values["ft"]))
    notes.extend(_without_effect(config, origins))
    return Resolved(config, origins, tuple(notes))


def _pick(item: Declaration, layers: list[Layer]) -> tuple[Any, Origin]:
    """The parsed value of the first layer that has one, and its origin."""
    for layer in layers:
        if item.key in layer:
            raw, origin = layer[item.key]
            return parsed(item, raw, origin), origin
    return item.default, Origin("default")


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    layer: Layer = {}
    for key, raw in flags.items():
        item = SETTINGS[key]
        if raw is not None:
            layer[key] = (raw, Origin("flag", (item.flags or item.env)[0]))
    return layer


def _environment_layer(environ: Mapping[str, str]) -> Layer:
    """Values of the NVRX_ and PET_ variables. Raises UsageError for a misspelt NVRX_FT_ or PET_FT_ variable."""
    known = {name for item in SETTINGS.values() for name in item.env}
    for name in environ:
        if name.startswith(("NVRX_FT_", "PET_FT_")) and name not in known:
            similar = sorted(k for k in known if k.startswith("NVRX_"))
            raise UsageError(
                f"{name} is not a known variable{did_you_mean(name, similar) or '; unset it'}"
            )
    layer: Layer = {}
    for item in SETTINGS.values():
        for name in item.env:
            if environ.get(name, "") != "" and item.key not in layer:
                layer[item.key] = (environ[name], Origin("environment", name))
    return layer


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each NVRX_ variable that is near a setting's. Others may be of the user or of another program."""
    known = dict[str, str]()
    others = set(_NO_SETTINGS)
    for item in SETTINGS.values():
        others.update(item.env)
        for name in reversed(item.env):
            known[name.partition("_")[2]] = name
    for name in environ:
        of_others = name in others or name.startswith(("NVRX_SUBMIT_", "NVRX_ATTRSVC_"))
        if of_others or not name.startswith("NVRX_"):
            continue
        guess = nearest(name.removeprefix("NVRX_"), known, _NEAR)
        if guess:
            yield f"{name} is not a known variable and has no effect; did you mean {known[guess]}?"


def _without_effect(config: Config, origins: Mapping[str, Origin]) -> Iterator[str]:
    for item in SETTINGS.values():
        value = getattr(getattr(config, item.section), item.name)
        if item.no_effect and value != item.default:
            yield f"{origins[item.key].name} has no effect: {item.no_effect}"
    if config.ft.rank_out_of_section_timeout is not None and not config.ft.rank_section_timeouts:
        origin = origins["ft_rank_out_of_section_timeout"].name
        yield f"{origin} has no effect: there are no sections, see --ft-rank-section-timeouts"
    for name in config.launch.rdzv_conf.ignored:
        yield f"{origins['rdzv_conf'].name}: {name} has no effect here"


def _yaml_for_launch(path: str, tolerant: bool, notes: list[str]) -> Layer:
    """The file as a layer by `Declaration.key`; every value in it is checked, used or not."""
    try:
        found = yaml_layer(path)
    except MissingSection as error:
        if not tolerant:
            raise
        notes.append(f"{error.args[0]} (going on, as --ft-ignore-missing-cfg says)")
        return {}
    layer = {f"ft_{name}": value for name, value in found.items()}
    for key in layer:
        _pick(SETTINGS[key], [layer])
    return layer
