"""The loop of torch_ways.py behind a Hydra entry: `hydra_entry.py +directory=DIR`."""

import sys
from pathlib import Path

import hydra


@hydra.main(version_base=None, config_path=None)
def main(config):
    sys.argv[1:] = ["plain"]
    import torch_ways

    torch_ways.train("plain", Path(config.directory))


if __name__ == "__main__":
    main()
