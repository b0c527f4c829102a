"""The timeouts of one RankMonitorClient: configured, loaded or calculated, and how the rank monitor gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.core.rank import learn
from nvrx_slurm.monitor import distributed, transport
from nvrx_slurm.monitor.transport import RankMonitorClientError


class Timeouts:
    """`heartbeats` and `sections`: the limits in force; before init only limits that were loaded.

    `path`: the rank monitor's socket while initialised, else "" (also without one). All methods that change limits
    raise RankMonitorClientError if the monitor refuses or does not answer; nothing has changed then.
    """

    def __init__(self) -> None:
        self.heartbeats = learn.HeartbeatTimeouts()
        self.sections = learn.SectionTimeouts()
        self.path = ""

    def configure(self, path: str, cfg: Any) -> None:
        """The rank is initialised: use the launcher's limits, with the limits that were calculated or loaded before."""
        self.path = path
        heartbeats = self.heartbeats
        if not heartbeats.were_calculated:
            heartbeats = learn.HeartbeatTimeouts(
                getattr(cfg, "initial_rank_heartbeat_timeout", None),
                getattr(cfg, "rank_heartbeat_timeout", None),
                False,
            )
        configured = learn.SectionTimeouts(
            getattr(cfg, "rank_section_timeouts", None) or {},
            getattr(cfg, "rank_out_of_section_timeout", None),
        )
        self._apply(heartbeats, learn.with_learned(configured, self.sections))

    def learn_heartbeats(
        self, first_ns: int, longest_ns: int, factor: float, may_skip: bool
    ) -> bool:
        """Collective: see RankMonitorClient.calculate_and_set_hb_timeouts."""
        return self._learn(
            [first_ns, longest_ns],
            lambda first_s, longest_s: self._apply(
                learn.learn_heartbeats(first_s, longest_s, factor, self.heartbeats), self.sections
            ),
            may_skip,
        )

    def learn_sections(
        self,
        longest: tuple[dict[str, int], int],
        factor: float,
        selected: list[str],
        outside: bool,
        may_skip: bool,
    ) -> bool:
        """Collective: see RankMonitorClient.calculate_and_set_section_timeouts. `longest`: see Sections.longest_ns."""
        in_sections_ns, outside_ns = longest

        def use(outside_s: float, *times_s: float) -> None:
            longest_s = dict(zip(in_sections_ns, times_s, strict=True))
            new = learn.learn_sections(
                longest_s, outside_s, factor, self.sections, selected, outside
            )
            self._apply(self.heartbeats, new)

        return self._learn([outside_ns, *in_sections_ns.values()], use, may_skip)

    def _learn(self, mine_ns: list[int], use: Callable[..., None], may_skip: bool) -> bool:
        """Call `use` with the largest of all ranks' times; False: no monitor, or nothing can be calculated yet."""
        if not self.path:
            return False
        try:
            use(*(time_ns / 1e9 for time_ns in distributed.largest(mine_ns)))
        except learn.NotReady as error:
            if may_skip:
                return False
            raise RankMonitorClientError(str(error)) from None
        return True

    def load(self, state: Mapping[str, Any]) -> None:
        """Use the limits of a former `learn.to_state`: at once while initialised, else from init on."""
        try:
            heartbeats, sections = learn.from_state(state)
        except ValueError as error:
            raise RankMonitorClientError(
                f"this is not the state of a RankMonitorClient: {error}"
            ) from None
        if not heartbeats.were_calculated:
            heartbeats = self.heartbeats
        if self.path:
            self._apply(heartbeats, learn.with_learned(self.sections, sections))
        else:
            self.heartbeats = heartbeats
            self.sections = sections

    def _apply(self, heartbeats: learn.HeartbeatTimeouts, sections: learn.SectionTimeouts) -> None:
        """Have the monitor use these limits, then keep them."""
        if self.path and (told := learn.to_message(heartbeats, sections)):
            transport.request(self.path, "limits", **told)
        self.heartbeats = heartbeats
        self.sections = sections
