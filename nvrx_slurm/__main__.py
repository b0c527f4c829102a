"""`python -m nvrx_slurm` is `nvrx-run`, as `python -m torch.distributed.run` is torchrun."""

from __future__ import annotations

from nvrx_slurm.cli.run import main

if __name__ == "__main__":
    main()
