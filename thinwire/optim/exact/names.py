"""The optimizers of this room that send gradients exactly, by the names that configurations call them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from thinwire.optim.exact.lamb import Lamb
from thinwire.optim.exact.lion import Lion
from thinwire.optim.exact.muon import Muon

__all__ = ["EXACT", "needs_whole_parameters"]

EXACT: Mapping[str, type[torch.optim.Optimizer]] = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon}


def needs_whole_parameters(name: str) -> bool:
    """Whether the optimizer of this name, ours or torch's, cannot step a part of a parameter by itself."""
    return name in EXACT and bool(getattr(EXACT[name], "whole_parameters", False))
