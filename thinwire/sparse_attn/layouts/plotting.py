"""Draws a layout: a picture tells sooner than its parameters what a pattern attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.sparse_attn.block_index import BlockIndex

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]


def draw(index: BlockIndex, name: str, seq_len: int) -> Axes:
    """The blocks of `seq_len` tokens of the layout called `name`: rows of queries down, columns of keys across, darker
    where more heads attend.

    Raises ImportError where matplotlib is missing.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("drawing a layout needs matplotlib: pip install matplotlib") from error
    _, axes = plt.subplots(figsize=(5, 5))
    axes.imshow(index.dense().float().mean(0).numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(f"keys, blocks of {index.block}")
    axes.set_ylabel(f"queries, blocks of {index.block}")
    axes.set_title(f"{name} attends {100 * index.density():.1f}% of {seq_len} x {seq_len}")
    return axes
