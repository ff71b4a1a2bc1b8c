"""BERT's sizes: Google's miniatures (Turc et al. 2019) and the two of the BERT paper."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "BertSize"]


@dataclass(frozen=True)
class BertSize:
    """Layers, width and attention heads; the feed-forward width is four times the width."""

    layers: int
    width: int
    heads: int


SIZES = {
    "tiny": BertSize(2, 128, 2),
    "mini": BertSize(4, 256, 4),
    "small": BertSize(4, 512, 8),
    "base": BertSize(12, 768, 12),
    "large": BertSize(24, 1024, 16),
}
