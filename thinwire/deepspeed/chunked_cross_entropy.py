"""Cross entropy of a language model's logits in blocks of rows, by DeepSpeed's names: no fp32 copy of all logits is
made, forward or backward."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from thinwire.deepspeed.errors import NotOfferedError

_BACKENDS = ("auto", "torch", "triton")
_BLOCK = 2**24  # elements: 64 MB in fp32
_STOCK = ("transformers.loss.loss_utils", "ForCausalLMLoss")


def chunked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    block_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """torch's cross_entropy of `logits`, [rows, vocabulary], and `target`, [rows], in fp32 at least.

    Backward computes each block of `block_rows` rows, by default about 2**24 elements, again, so that beside the logits
    and their gradient one block is in memory. `backend` "torch" is "auto": torch's operations, on any device.

    Raises ValueError for shapes, a reduction, a backend or rows that cannot be, TypeError for rows that are no whole
    number, NotOfferedError, a RuntimeError, for "triton", and what torch raises for targets.
    """
    _check_options(block_rows, backend)
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits of [rows, vocabulary] and a target of [rows], got {[*logits.shape]} and {[*target.shape]}"
        )
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f'reduction is "none", "sum" or "mean", not {reduction!r}')
    rows = block_rows or max(1, _BLOCK // max(1, logits.shape[1]))
    target = target.to(logits.device)
    blocks = zip(torch.split(logits, rows), torch.split(target, rows), strict=True)
    again = partial(checkpoint, _losses, use_reentrant=False, preserve_rng_state=False)
    losses = torch.cat([again(*block, ignore_index) for block in blocks])
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum().to(total.dtype)


def triton_backend_available() -> bool:
    """Whether `backend` may be "triton": no."""
    return False


class ChunkedCausalLMLoss:
    """Hugging Face's loss of causal language models by `chunked_cross_entropy`: call it as a model calls its own."""

    def __init__(self, block_rows: int | None = None, backend: str = "auto") -> None:
        _check_options(block_rows, backend)
        self.block_rows, self.backend = block_rows, backend

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The mean over labelled tokens, or the sum over `num_items_in_batch`; `others` change nothing, as there."""
        if shift_labels is None:
            if labels is None:
                raise ValueError("the loss needs labels, or shift_labels, and got neither")
            shift_labels = functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
        target = shift_labels.reshape(-1)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = chunked_cross_entropy(
            logits.reshape(-1, vocab_size), target, ignore_index, reduction, self.block_rows, self.backend
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def install_chunked_causal_lm_loss(
    model: Any, block_rows: int | None = None, backend: str = "auto"
) -> ChunkedCausalLMLoss:
    """Have a Hugging Face model compute its loss by `ChunkedCausalLMLoss`, which is returned.

    Raises ValueError for a model whose `loss_function` is not Hugging Face's ForCausalLMLoss, or cannot be set.
    """
    stock = getattr(model, "loss_function", None)
    if (getattr(stock, "__module__", None), getattr(stock, "__name__", None)) != _STOCK:
        raise ValueError(
            f"the model's loss_function is {stock!r}, and this replaces the stock Hugging Face ForCausalLMLoss alone: "
            "call chunked_cross_entropy in the model's own loss"
        )
    loss = ChunkedCausalLMLoss(block_rows, backend)
    with suppress(AttributeError, TypeError):
        model.loss_function = loss
    if model.loss_function != loss:
        raise ValueError(f"loss_function of a {type(model).__name__} is not writable: it keeps its own")
    return loss


def _losses(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, target, ignore_index=ignore_index, reduction="none")


def _check_options(block_rows: object, backend: str) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"Unsupported chunked cross-entropy backend {backend!r}: give one of {', '.join(_BACKENDS)}")
    if backend == "triton":
        raise NotOfferedError(
            'backend="triton" needs CUDA logits and Triton in DeepSpeed, and is not offered here: use "torch"'
        )
    if block_rows is None:
        return
    if isinstance(block_rows, bool) or not isinstance(block_rows, int):
        raise TypeError(f"block_rows is a whole number of rows or None, not {block_rows!r}")
    if block_rows < 1:
        raise ValueError(f"block_rows is at least 1, not {block_rows}")
