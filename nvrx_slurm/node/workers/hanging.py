"""Says which path hangs where workers start: this program may block there, too, and cannot say it then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nvrx_slurm.system import bounded
from nvrx_slurm.system.foreign import last_bytes

_ANSWER_S = 4.0


def name_what_hangs(paths: Sequence[str], say: Callable[[str], None]) -> None:
    """Read one byte of each path in a thread, and say which one does not answer. Does not wait."""

    def read() -> None:
        for path in paths:
            try:
                bounded.call(partial(last_bytes, path, 1), _ANSWER_S, path)
            except bounded.Overrun as error:
                say(f"{error}: its file system may hang")
            except OSError:
                continue

    bounded.begin(read, "paths")
