"""Block-sparse attention on CPUs: heads, or parts of heads, are shared out to threads that run compiled loops.

Loops calculate in float32: what is not float32 is converted head by head, so that no copy of a whole tensor is made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.simd.workers import Workers
from thinwire.sparse_attn.block_index import Heads, Pattern, Sizes
from thinwire.sparse_attn.kernels.cpu.attention import backward_heads, forward_heads
from thinwire.sparse_attn.kernels.cpu.tiles import Blocks, Dropout, Integers, Scores
from thinwire.sparse_attn.masks import Biases
from thinwire.sparse_attn.reference import head_keys, keep_threshold

_NOTHING = np.empty(0, np.float32)
_NO_KEYS = np.empty(0, np.uint32)

_SHARES = 8
"""Shares of the work that each of several threads takes in turn: heads and their rows differ in what they attend."""

_workers = Workers()


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Output [B, H, Sq, D] like q, and float32 log-sum-exp [B, H, Sq], +inf where nothing is attended."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32)
    threads, heads = _workers.threads(), q.size(0) * q.size(1)
    few = heads % threads != 0 and heads < _SHARES * threads
    parts = min(pattern.index.num_rows, -(-_SHARES * threads // heads)) if few else 1
    results = out
    if parts > 1:  # every part of a head would convert all of it
        q, k, v = map(_in_float32, (q, k, v))
        results = out if _is_direct(out) else torch.empty(out.shape, dtype=torch.float32)
    scores, flat_lse = _scores(q, k, pattern), lse.view(-1).numpy()
    loop = functools.partial(forward_heads, flat_lse, scores, parts)
    _share_out(loop, (q, k, v), (results,), [[task] for task in range(heads * parts)], threads)
    if results is not out:
        out.copy_(results)
    return out, lse


def backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pattern: Pattern, *, needs_d_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if asked for, of the pattern's bias, in its shape."""
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_bias = None
    if needs_d_bias and pattern.bias is not None:
        bias = pattern.bias.contiguous()
        pattern, d_bias = dataclasses.replace(pattern, bias=bias), torch.zeros_like(bias)
    scores, flat_lse = _scores(q, k, pattern), lse.view(-1).numpy()
    flat_d_bias = _NOTHING if d_bias is None else _flat(d_bias)
    loop = functools.partial(backward_heads, flat_lse, flat_d_bias, scores)
    groups = _heads_that_share(d_bias, q.size(0), q.size(1))
    _share_out(loop, (d_out, q, k, v, out), gradients, groups, _workers.threads())
    return *gradients, d_bias


def _share_out(
    loop: Callable[[tuple[Heads, ...], Integers], None],
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    threads: int,
) -> None:
    """Run loop(inputs and results, numbers) until every number of every group was given to it, a group's in order.

    Where not everything can be handed to loops as it is, the numbers must be those of heads, counted sample by sample:
    the loop then gets one head's matrices in float32 at a time.
    """
    count = min(len(groups), threads * _SHARES if threads > 1 else 1)
    edges = [len(groups) * share // max(count, 1) for share in range(count + 1)]
    direct = all(map(_is_direct, (*inputs, *results)))
    whole = tuple(map(_heads, (*inputs, *results))) if direct else ()

    def work(share: int) -> None:
        numbers = list(itertools.chain.from_iterable(groups[edges[share] : edges[share + 1]]))
        if direct:
            loop(whole, np.array(numbers, np.int32))
            return
        for number in numbers:
            batch, head = divmod(number, inputs[0].size(1))
            of_head = [torch.empty(one.shape[2:], dtype=torch.float32) for one in results]
            matrices = [*(_in_float32(one[batch, head]) for one in inputs), *of_head]
            loop(tuple(map(_heads, matrices)), np.array([number], np.int32))
            for one, values in zip(results, of_head, strict=True):
                one[batch, head].copy_(values)

    _workers.each(work, count, threads)


def _scores(q: Tensor, k: Tensor, pattern: Pattern) -> Scores:
    """The pattern as loops see it."""
    (batch, heads, queries, width), keys = q.shape, k.size(2)
    index, biases = pattern.index, Biases.of(pattern.key_bias, pattern.bias, nothing=torch.empty(0))
    biases = biases._replace(keys=_flat(biases.keys), pairs=_flat(biases.pairs))
    hash_keys = _NO_KEYS
    if pattern.dropout_p > 0:
        hash_keys = head_keys(pattern.seed, batch * heads).numpy().astype(np.uint32)
    dropout = Dropout(hash_keys, np.uint32(keep_threshold(pattern.dropout_p)), np.float32(1 / (1 - pattern.dropout_p)))
    blocks = Blocks(index.row_offsets.numpy(), index.columns.numpy(), index.num_heads, index.num_rows, index.block)
    return Scores(
        blocks, Sizes(heads, queries, keys, width), biases, dropout, pattern.causal, np.float32(pattern.scale)
    )


def _is_direct(tensor: Tensor) -> bool:
    """Whether loops can take it as it is."""
    return tensor.dtype == torch.float32 and tensor.stride(-1) == 1


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor if _is_direct(tensor) else tensor.float().contiguous()


def _heads(tensor: Tensor) -> Heads:
    """A tensor [B, H, S, D], or [S, D] for every head, as loops see it."""
    return Heads(_flat(tensor), *(0, 0, *tensor.stride())[-4:-1])


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    """The memory from a tensor's first element to its last, whatever its strides."""
    if tensor.numel() == 0:
        return _NOTHING
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).numpy()


def _heads_that_share(d_bias: Tensor | None, batch: int, heads: int) -> list[list[int]]:
    """The numbers of all heads, those that add to the same part of `d_bias` together: one thread adds them up, in this
    order."""
    every = itertools.product(range(batch), range(heads))
    if d_bias is None:
        return [[number] for number in range(batch * heads)]
    groups: dict[tuple[int, int], list[int]] = {}
    for sample, head in every:
        place = (sample if d_bias.size(0) > 1 else 0, head if d_bias.size(1) > 1 else 0)
        groups.setdefault(place, []).append(sample * heads + head)
    return list(groups.values())
