"""The plug for transformers' attention interface (version 5 on): one registered function, one mask function.

Both are the same for all models; the layout hangs on the modules of each model, which the function is handed. It stands
in the model's configuration, where `save_pretrained` writes it and `from_pretrained` finds it again, beside
``attn_implementation``, which transformers obeys while it loads: a process that has not registered sparse attention
refuses the model instead of computing something else with its weights."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from thinwire.sparse_attn.attention import block_sparse_attention
from thinwire.sparse_attn.hugging_face.padding import layout_for
from thinwire.sparse_attn.layouts.base import Layout
from thinwire.sparse_attn.layouts.made import layout_from_config, layout_to_config
from thinwire.sparse_attn.layouts.named import Custom

_SECTION = "thinwire_sparse_attention"
_IMPLEMENTATION = "attn_implementation"
_TO_LOAD = "call thinwire.sparse_attn.register_with_transformers() before from_pretrained"


def _keep_layout(config: Any, layout: Layout, dense: str) -> None:
    """Write `layout` into `config`, and what the model attended with before. A `Custom` layout is not written: the
    model is then refused when it attends, until `sparsify` gives it one."""
    setattr(config, _IMPLEMENTATION, _NAME)
    section: dict[str, Any] = {"to_load": _TO_LOAD, "dense_attention": dense}
    if not isinstance(layout, Custom):
        section |= {"num_heads": layout.num_heads, "layout": layout_to_config(layout)}
    setattr(config, _SECTION, section)


def kept_layout(config: Any) -> Layout | None:
    """The layout that `config` holds, if any. Raises ValueError for one that was edited into something else."""
    section = _section(config)
    if "layout" not in section:
        return None
    if "mode" not in section["layout"]:
        raise ValueError(f"config.{_SECTION}.layout has no mode")
    try:
        return layout_from_config(section["layout"], section["num_heads"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"config.{_SECTION}.layout: {error}") from error


def _dense_attention(config: Any) -> str:
    """What the model of `config` attended with before, if it says so. Raises ValueError as `kept_layout` does."""
    return str(_section(config).get("dense_attention") or "sdpa")


def _section(config: Any) -> dict[str, Any]:
    """What `_keep_layout` wrote into `config`. Raises ValueError for what it never writes."""
    section = getattr(config, _SECTION, None)
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ValueError(f"config.{_SECTION} must be a dictionary, got {reprlib.repr(section)}")
    for name, kind in (("layout", dict), ("num_heads", int), ("dense_attention", str)):
        absent = name not in section and (name != "num_heads" or "layout" not in section)
        if not absent and not isinstance(section.get(name), kind):
            raise ValueError(
                f"config.{_SECTION}.{name} must be of type {kind.__name__}, got {reprlib.repr(section.get(name))}"
            )
    return section


# Transformers takes names with "flash" or "/" for its own kernels.
_NAME = "thinwire_block_sparse"
_LAYOUT = "_thinwire_layout"
_DENSE = "_thinwire_dense_implementation"
# What other models' attention functions take, and would be a wrong result if it were ignored.
_UNSUPPORTED = {"softcap": "capped scores", "s_aux": "attention sinks", "cache": "a paged key/value cache"}


class InterfacePlug:
    """Switches a model between its own attention implementation and the registered sparse one."""

    def __init__(self) -> None:
        self._dense_implementation = ""

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether `model` is a transformers 5 model whose attention goes through the interface."""
        can_set = getattr(model, "_can_set_attn_implementation", None)
        return can_set is not None and _has_interface() and bool(can_set())

    @staticmethod
    def serves_layer(attention: nn.Module) -> bool:
        """Whether `attention` is a self-attention module of transformers 5 that goes through the interface."""
        return hasattr(getattr(attention, "config", None), "_attn_implementation") and _has_interface()

    @staticmethod
    def set_layout_of_layer(attention: Any, layout: Layout) -> None:
        """Choose sparse attention for the model that one self-attention module is of, and hang `layout` on that one."""
        register_with_transformers()
        config = attention.config
        before = config._attn_implementation
        dense = _dense_attention(config) if before == _NAME else before
        config._attn_implementation = _NAME
        _keep_layout(config, layout, dense)
        setattr(attention, _LAYOUT, layout)
        setattr(attention, _DENSE, dense)

    @staticmethod
    def attends(model: nn.Module) -> bool:
        """Whether `model` attends over a layout that its configuration holds, whoever chose so."""
        config = getattr(model, "config", None)
        return getattr(config, "_attn_implementation", None) == _NAME and kept_layout(config) is not None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled model may wake in a process that knows no sparse attention yet."""
        vars(self).update(state)
        register_with_transformers()

    def attach(self, model: Any) -> None:
        """Register the functions, and remember what `model`, or the whole that it is a part of, attended with."""
        register_with_transformers()
        current: str = model.config._attn_implementation
        if current == _NAME:  # loaded from what a sparse model saved
            current = _dense_attention(model.config)
        self._dense_implementation = vars(model).get(_DENSE, current)

    def set_layout(self, model: Any, layout: Layout) -> None:
        """Choose sparse attention, and hang `layout` on every module: the function is handed any of them."""
        model.set_attn_implementation(_NAME)
        for module in model.modules():
            setattr(module, _LAYOUT, layout)
            setattr(module, _DENSE, self._dense_implementation)
        _keep_layout(model.config, layout, self._dense_implementation)

    def detach(self, model: Any) -> None:
        """Choose the implementation that was there before."""
        model.set_attn_implementation(self._dense_implementation)
        for name in (_SECTION, _IMPLEMENTATION):  # what was written there
            vars(model.config).pop(name, None)
        for module in model.modules():
            vars(module).pop(_LAYOUT, None)
            vars(module).pop(_DENSE, None)


def _has_interface() -> bool:
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def register_with_transformers() -> None:
    """Let `from_pretrained` load what a sparse model saved with `save_pretrained`, sparse attention included.

    Needed once, before loading, in a process that has not called `sparsify`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention_forward)
    # Without a mask function of the same name, transformers drops padding masks.
    AttentionMaskInterface.register(_NAME, _attention_mask)


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The interface's attention: query [B, H, S, D], key and value [B, H / groups, S, D] to [B, S, H, D]."""
    layout = getattr(module, _LAYOUT, None) or _wake(module)
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name} ({meaning}), which block-sparse attention does not compute; "
                f"call densify(model)"
            )
    if key.shape[2] != query.shape[2]:
        raise ValueError(_cache_message(query.shape[2], key.shape[2]))
    groups = query.shape[1] // key.shape[1]
    out = block_sparse_attention(
        query,
        key.repeat_interleave(groups, dim=1) if groups > 1 else key,
        value.repeat_interleave(groups, dim=1) if groups > 1 else value,
        layout_for(layout, query.shape[2]),
        attn_mask=attention_mask,
        rpe=position_bias,
        causal=_is_causal(module, attention_mask, is_causal),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.transpose(1, 2).contiguous(), None


def _wake(module: Any) -> Layout:
    """The layout of a module whose model came from `from_pretrained`; kept, and the configuration is ready to be saved
    again: transformers takes ``attn_implementation`` out of what it reads."""
    layout = kept_layout(module.config)
    if layout is None:
        raise ValueError(
            f"attn_implementation is {_NAME!r}, but this {type(module).__name__} has no layout: call "
            f"sparsify(model, layout), or load the model with another attn_implementation"
        )
    _keep_layout(module.config, layout, _dense_attention(module.config))
    setattr(module, _LAYOUT, layout)
    return layout


def _is_causal(module: nn.Module, attention_mask: Tensor | None, given: bool | None) -> bool:
    """A mask over queries and keys is the whole truth, as for transformers' own; one over keys alone is padding."""
    if attention_mask is not None and attention_mask.shape[-2] > 1:
        return False
    if given is not None:
        return given
    config = getattr(module, "config", None)
    return bool(getattr(module, "is_causal", True) and getattr(config, "is_causal", True))


def _attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The interface's mask: padding alone, bool [B, 1, 1, S], or none, where the module's `is_causal` says the rest.

    Sliding windows, packed sequences and users' own mask functions become a mask of queries and keys, S x S.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    if q_length != kv_length:
        raise ValueError(_cache_message(q_length, kv_length))
    if mask_function in (None, causal_mask_function, bidirectional_mask_function):
        return None if attention_mask is None else attention_mask[:, None, None, :]
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return mask


def _cache_message(queries: int, keys: int) -> str:
    return (
        f"got {queries} queries and {keys} keys: block-sparse attention does not decode from a key/value cache; "
        f"pass use_cache=False, or call densify(model) before generating"
    )
