"""From a configuration's `sparse_attention` section, as DeepSpeed's users write it, to a layout."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from thinwire.sparse_attn.layouts.named import BigBird, BSLongformer, Dense, Fixed, Layout, LocalSlidingWindow, Variable

__all__ = ["layout_from_config", "layout_to_config"]

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

    Another mode's parameter may stand there at its default, where it asks for nothing: DeepSpeed's own example of a
    section spells them all out.

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
        if name != "mode" and (name in known or not _is_default_of_another(name, value))
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
    """A layout's parameters and their defaults."""
    return {one.name: one.default for one in fields(layout) if one.init and one.name != "num_heads"}


def _is_default_of_another(name: str, value: Any) -> bool:
    """Whether some mode has this parameter, and this value of it says nothing."""
    value = tuple(value) if isinstance(value, list) else value
    defaults = [_parameters(layout)[name] for layout in _MODES.values() if name in _parameters(layout)]
    return value in defaults


def _nearest(name: object, known: list[str]) -> str:
    close = difflib.get_close_matches(f"{name!s:.80}", known, 1)
    return f' Did you mean "{close[0]}"?' if close else f" Known: {', '.join(known)}"
