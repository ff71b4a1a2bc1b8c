"""The plug for BERT and RoBERTa encoders of transformers 4, whose attention modules compute attention themselves.

Each is swapped for a module with the same projections, the same place in `state_dict` and the same results' form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thinwire.sparse_attn.attention import block_sparse_attention
from thinwire.sparse_attn.hugging_face.padding import layout_for
from thinwire.sparse_attn.layouts.base import Layout

_SWAPPABLE = {"BertSelfAttention", "BertSdpaSelfAttention", "RobertaSelfAttention", "RobertaSdpaSelfAttention"}


class SwappedSelfAttention(nn.Module):
    """A transformers 4 BertSelfAttention that attends over the blocks of `layout`, with the projections of `dense`."""

    def __init__(self, dense: Any) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dropout = dense.query, dense.key, dense.value, dense.dropout
        self.num_attention_heads: int = dense.num_attention_heads
        self.layout: Layout | None = None
        # In a tuple, so that its parameters are not counted twice.
        self._dense = (dense,)
        self.train(dense.training)

    @property
    def dense(self) -> nn.Module:
        """The module this one stands in for, in the same mode (training or not)."""
        dense: nn.Module = self._dense[0]
        return dense.train(self.training)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: object = None,
        output_attentions: bool | None = False,
        *,
        past_key_values: object = None,
        cache_position: Tensor | None = None,
    ) -> tuple[Tensor]:
        """[B, S, E] to ([B, S, E],). Takes what any transformers 4 passes; `cache_position` says nothing here.

        Raises ValueError for a head mask, cross-attention, a cache, or attention probabilities.
        """
        unsupported = {
            "head_mask": head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
            "past_key_values": past_key_values,
            "output_attentions": output_attentions or None,
        }
        given = [name for name, value in unsupported.items() if value is not None]
        if given:
            raise ValueError(f"{', '.join(given)} given, which sparse attention cannot serve; call densify(model)")
        assert self.layout is not None
        q, k, v = (
            projection(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        out = block_sparse_attention(
            q,
            k,
            v,
            layout_for(self.layout, hidden_states.shape[1]),
            attn_mask=attention_mask,
            dropout_p=self.dropout.p if self.training else 0.0,
        )
        return (out.transpose(1, 2).flatten(2),)


class SwapPlug:
    """Swaps a model's attention modules, and swaps them back."""

    def __init__(self) -> None:
        self._mask_implementations: dict[str, str] = {}

    @staticmethod
    def serves(model: nn.Module) -> bool:
        """Whether `model` is an encoder with absolute positions and transformers 4's attention modules."""
        config = getattr(model, "config", None)
        return (
            any(
                type(module).__name__ in _SWAPPABLE or isinstance(module, SwappedSelfAttention)
                for module in model.modules()
            )
            and not getattr(config, "is_decoder", False)
            and getattr(config, "position_embedding_type", "absolute") == "absolute"
        )

    @staticmethod
    def serves_layer(attention: nn.Module) -> bool:
        """Whether `attention` is a module that this plug swaps, or has swapped."""
        kind = type(attention)
        ours = kind.__name__ in _SWAPPABLE and kind.__module__.startswith("transformers.")
        return ours or isinstance(attention, SwappedSelfAttention)

    def attach(self, model: nn.Module) -> None:
        """Swap every attention module of `model`."""
        for name, module in list(model.named_modules()):
            # The choice that makes transformers 4 hand a [B, 1, 1, S] mask to layers, and not an S x S one.
            if isinstance(getattr(module, "attn_implementation", None), str):
                self._mask_implementations[name] = module.attn_implementation
                module.attn_implementation = "eager"
            if type(module).__name__ in _SWAPPABLE:
                model.set_submodule(name, SwappedSelfAttention(module))

    def set_layout(self, model: nn.Module, layout: Layout) -> None:
        """Give every swapped module its layout."""
        for module in model.modules():
            if isinstance(module, SwappedSelfAttention):
                module.layout = layout

    def detach(self, model: nn.Module) -> None:
        """Put the modules back that `attach` took out."""
        for name, module in list(model.named_modules()):
            if name in self._mask_implementations:
                module.attn_implementation = self._mask_implementations[name]
            if isinstance(module, SwappedSelfAttention):
                model.set_submodule(name, module.dense)
