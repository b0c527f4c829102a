"""What `nvrx-run --nvrx-compat` puts first on the workers' path: this folder, with a package nvidia_resiliency_ext."""

from __future__ import annotations

import os
from collections.abc import Mapping


def python_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH of `environ` with this folder first."""
    return os.pathsep.join(filter(None, (os.path.dirname(__file__), environ.get("PYTHONPATH"))))
