"""A Python that starts warm: `WarmPython` forks every program from one process that has loaded torch.

Tests start hundreds of ranks, and each would spend 5 s of processor time on importing the same modules.
"""

from tests.warm_python.owner import WarmPython

__all__ = ["WarmPython"]
