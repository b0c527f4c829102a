"""The `sitecustomize` of a template's interpreter, see `start.py`, and of executed workers, see `steps.py`.

In a template it begins the journal of imports before anything else is imported, so that the script finds no module of
the template.
"""

import os
import sys

EXECUTED = "executed"
setup = os.environ.pop("NVRX_TEMPLATE")  # "executed", "executed=PYTHONPATH", "trial", or JSON


def main():
    """Be the template. Returns in a worker."""
    hook_dir = os.path.dirname(__file__)
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


def be_executed():
    """Count the steps of the script, and leave no other trace."""
    import nvrx_steps

    del sys.modules["nvrx_steps"], sys.modules["nvrx_store_wait"]
    _, was_set, python_path = setup.partition("=")
    nvrx_steps.begin(os.path.dirname(__file__), python_path if was_set else None)


try:
    be_executed() if setup.startswith(EXECUTED) else main()
except BaseException:  # else Python would say so, go on, and run the script
    if not setup.startswith(EXECUTED):
        os._exit(1)
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  the user's own; where there is none, `site` expects this ImportError
