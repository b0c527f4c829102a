"""For the plug-ins' tests."""

# First lines of a child process that needs single modules of nvrx_slurm.inprocess: the package itself imports torch,
# which takes seconds, the plug-ins do not.
WITHOUT_TORCH = """
import sys, types
import nvrx_slurm
package = types.ModuleType("nvrx_slurm.inprocess")
package.__path__ = [f"{path}/inprocess" for path in nvrx_slurm.__path__]
sys.modules[package.__name__] = package
"""
