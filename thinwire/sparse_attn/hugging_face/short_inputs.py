"""What a model attends with when its input has fewer blocks than the layout puts into a row."""

from __future__ import annotations

from thinwire.sparse_attn.layouts.named import Dense, Layout

__all__ = ["layout_for"]


def layout_for(layout: Layout, length: int) -> Layout:
    """`layout`, or every block where `length` tokens are too few for its pattern: its window would hold them all.

    Models meet short inputs in every last batch and at every first token, and must take them as they did before.
    """
    if layout.fits(length):
        return layout
    return Dense(1, layout.block, attention="unidirectional" if layout.causal else "bidirectional")
