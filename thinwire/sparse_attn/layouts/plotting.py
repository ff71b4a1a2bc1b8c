"""Draws a layout: a picture tells sooner than its parameters what a pattern attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from thinwire.sparse_attn.layouts.base import Layout

__all__ = ["draw"]


def draw(layout: Layout, seq_len: int) -> Axes:
    """Block rows (queries) down, block columns (keys) across, darker where more heads attend.

    Raises ImportError where matplotlib is missing.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("drawing a layout needs matplotlib: pip install matplotlib") from error
    index = layout.index(seq_len)
    _, axes = plt.subplots(figsize=(5, 5))
    axes.imshow(index.dense().float().mean(0).numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(f"keys, blocks of {layout.block}")
    axes.set_ylabel(f"queries, blocks of {layout.block}")
    axes.set_title(f"{type(layout).__name__} attends {100 * index.density():.1f}% of {seq_len} x {seq_len}")
    return axes
