"""The `sitecustomize` of a template's interpreter; see `start.py`.

It begins the journal of imports before anything else is imported, so that the script finds no module of the template.
"""

import os
import sys


def main():
    """Be the template. Returns in a worker."""
    hook_dir = os.path.dirname(__file__)
    setup = os.environ.pop("NVRX_TEMPLATE")
    if setup != "trial":  # see start.py
        import nvrx_journal

        journal = nvrx_journal.Journal()
        sys.meta_path.insert(0, journal)
        journal.record("nvrx_template", (), {})
        template = sys.modules["nvrx_template"]
        journal.park()
        journal.forget("nvrx_")
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    if setup == "trial":
        sys._nvrx_before = [*sys.path], {**os.environ}
    else:
        template.main(setup, journal, hook_dir)


try:
    main()
except BaseException:  # else Python would say so, go on, and run the script
    os._exit(1)
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  the user's own; where there is none, `site` expects this ImportError
