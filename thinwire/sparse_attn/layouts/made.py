"""Layouts that are made elsewhere: a base class for users' own, what a module saved, or what a configuration's
`sparse_attention` section says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.named import BigBird, BSLongformer, Dense, Fixed, LocalSlidingWindow, Variable


class SparsityConfig:
    """The base of users' own layouts: a subclass has `make_layout(seq_len)`, which returns
    0 and 1 [num_heads, blocks, blocks].

    `num_layout_heads`: heads to fill in, 1 where all are alike.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """No blocks yet: int64 zeros [num_heads, blocks, blocks]. Raises ValueError for no multiple of the block."""
        if seq_len % self.block:
            raise ValueError(f"the sequence has {seq_len} tokens, expected a multiple of the block of {self.block}")
        blocks = seq_len // self.block
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """`layout`, in place with the first head's blocks in every head where all are alike."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> Tensor:
        """The blocks of `seq_len` tokens, which a subclass gives."""
        raise NotImplementedError(f"{type(self).__name__} has no make_layout(seq_len): derive a class that has")


class MadeLayout(Layout):
    """What `make(seq_len)` returns for whole blocks, 0 and 1 [num_heads, blocks, blocks], as a layout; `causal` to the
    token besides."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, num_heads: int, block: int, make: Callable[[int], Tensor], *, causal: bool = False) -> None:
        super().__init__(num_heads, block, different_layout_per_head=True)
        object.__setattr__(self, "attention", "unidirectional" if causal else "bidirectional")
        object.__setattr__(self, "make", make)
        object.__setattr__(self, "_content", f"{self!r} {id(make)}")

    def _make_index(self, query_length: int, key_length: int) -> BlockIndex:
        rows, columns = self._blocks_of(query_length, key_length)
        if rows != columns:
            raise ValueError(f"this layout is for one sequence, got {query_length} queries and {key_length} keys")
        make: Callable[[int], Tensor] = vars(self)["make"]
        mask = make(rows * self.block)
        if mask.shape != (self.num_heads, rows, rows):
            raise ValueError(
                f"make_layout({rows * self.block}) gave shape {list(mask.shape)}, expected [heads, blocks, blocks] = "
                f"[{self.num_heads}, {rows}, {rows}]"
            )
        pairs = [(one.nonzero()[:, 0], one.nonzero()[:, 1]) for one in mask.cpu()]
        return BlockIndex.from_pairs(self.block, rows, columns, pairs)


def layout_of(config: Any) -> Layout:
    """A layout as it is; one that makes what a `SparsityConfig`, or whatever has its attributes, makes.

    Raises TypeError for anything else.
    """
    if isinstance(config, Layout):
        return config
    if all(hasattr(config, name) for name in ("num_heads", "block", "make_layout")):
        return MadeLayout(config.num_heads, config.block, config.make_layout)
    raise TypeError(
        f"expected a layout, or a sparsity configuration with num_heads, block and make_layout, got "
        f"{type(config).__name__}"
    )


_MODES: dict[str, type[Layout]] = {
    "bigbird": BigBird,
    "bslongformer": BSLongformer,
    "dense": Dense,
    "fixed": Fixed,
    "local": LocalSlidingWindow,
    "local_sliding_window": LocalSlidingWindow,
    "variable": Variable,
}


def layout_from_config(section: Mapping[str, Any], num_heads: int) -> Layout:
    """The layout that `section` describes: `mode`, "fixed" by default, and that layout's parameters by their names.

    Another mode's parameter may stand there at its default, where it asks for nothing: widely copied examples of a
    section spell them all out.

    Raises ValueError or TypeError for an unknown mode, or a parameter that is unknown or cannot work.
    """
    mode = section.get("mode", "fixed")
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f'"sparse_attention.mode" {mode!r:.80} is not known.{_nearest(mode, list(_MODES))}')
    layout = _MODES[mode]
    known = list(_parameters(layout))
    given = {
        name: value
        for name, value in section.items()
        if name != "mode"
        and (name in known or (tuple(value) if isinstance(value, list) else value) not in _defaults(name))
    }
    for name in given:
        if name not in known:
            raise ValueError(
                f'"sparse_attention.{name:.80}" is not a parameter of mode "{mode}".{_nearest(name, known)}'
            )
    try:
        return layout(num_heads, **given)
    except (ValueError, TypeError) as error:
        raise type(error)(f'"sparse_attention": {error}') from error


def layout_to_config(layout: Layout) -> dict[str, Any]:
    """The section of which `layout_from_config` makes `layout` again, of values that JSON holds.

    Raises ValueError for a Custom layout, whose mask of blocks belongs to no configuration.
    """
    mode = next((name for name, kind in _MODES.items() if isinstance(layout, kind)), None)
    if mode is None:
        raise ValueError(f"a {type(layout).__name__} layout cannot be written into a configuration")
    values = {name: getattr(layout, name) for name in _parameters(type(layout))}
    return {"mode": mode} | {name: list(one) if isinstance(one, tuple) else one for name, one in values.items()}


def _parameters(layout: type[Layout]) -> dict[str, Any]:
    return {one.name: one.default for one in fields(layout) if one.init and one.name != "num_heads"}


def _defaults(name: str) -> list[Any]:
    """Of a parameter in all modes that have it."""
    return [_parameters(layout)[name] for layout in _MODES.values() if name in _parameters(layout)]


def _nearest(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(f"{name!s:.80}", known, 1)
    return f' Did you mean "{close[0]}"?' if close else f" Known: {', '.join(known)}"
