"""`nvrx` within the test's process."""

import json

from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main


def nvrx(*words, **env):
    """What `nvrx WORDS` prints with the variables NAME=VALUE, and its exit code."""
    return CliRunner(env=env).invoke(main, [*map(str, words)], catch_exceptions=False)


def nvrx_json(*words, **env):
    """The JSON that it prints, while its exit code is 0."""
    done = nvrx(*words, **env)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
