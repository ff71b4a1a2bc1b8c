"""The layout in a model's configuration, where `save_pretrained` writes it and `from_pretrained` finds it again.

Beside it stands ``attn_implementation``, which transformers obeys while it loads: a process that has not registered
sparse attention refuses the model instead of computing something else with its weights.
"""

from __future__ import annotations

from typing import Any

from thinwire.sparse_attn.layouts.config import layout_from_config, layout_to_config
from thinwire.sparse_attn.layouts.named import Custom, Layout

__all__ = ["dense_attention", "forget_layout", "keep_layout", "kept_layout"]

_SECTION = "thinwire_sparse_attention"
_IMPLEMENTATION = "attn_implementation"


def keep_layout(config: Any, layout: Layout, implementation: str, dense: str) -> None:
    """Write `layout` into `config`, and what the model attended with before. A `Custom` layout is not written: the
    model is then refused when it attends, until `sparsify` gives it one."""
    setattr(config, _IMPLEMENTATION, implementation)
    section: dict[str, Any] = {"dense_attention": dense}
    if not isinstance(layout, Custom):
        section |= {"num_heads": layout.num_heads, "layout": layout_to_config(layout)}
    setattr(config, _SECTION, section)


def kept_layout(config: Any) -> Layout | None:
    """The layout that `config` holds, if any.

    Raises ValueError or TypeError for one that was edited into something else.
    """
    section = getattr(config, _SECTION, None) or {}
    if "layout" not in section:
        return None
    return layout_from_config(section["layout"], section["num_heads"])


def dense_attention(config: Any) -> str | None:
    """What the model of `config` attended with before, where it says so."""
    section: dict[str, str] = getattr(config, _SECTION, None) or {}
    return section.get("dense_attention")


def forget_layout(config: Any) -> None:
    """Take out of `config` what `keep_layout` wrote."""
    for name in (_SECTION, _IMPLEMENTATION):
        vars(config).pop(name, None)
