"""Block-sparse attention on CPUs: one task a head, or a part of one, for compiled loops that run without the GIL.

Loops calculate in float32: what is not float32 is converted head by head, so that no copy of a whole tensor is made.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.simd.workers import Workers
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.dropout import head_keys, keep_threshold
from thinwire.sparse_attn.kernels.cpu.backward import backward_head
from thinwire.sparse_attn.kernels.cpu.forward import forward_rows

__all__ = ["backward", "forward"]

_NOTHING = np.empty(0, np.float32)

_workers = Workers()


class _Call:
    """What all heads of one call have in common."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        index: BlockIndex,
        key_bias: Tensor | None,
        bias: Tensor | None,
        seed: Tensor,
        causal: bool,
        scale: float,
        dropout_p: float,
    ) -> None:
        self.batch, self.heads, self.query_length, self.width = q.shape
        self.key_length = k.shape[2]
        self._index = index
        self._key_bias = None if key_bias is None else key_bias.contiguous()
        self._bias = bias
        self._keys = head_keys(seed, self.batch * self.heads).tolist() if dropout_p > 0 else None
        self._numbers = (causal, np.float32(scale))
        self._threshold, self._kept = np.uint32(keep_threshold(dropout_p)), np.float32(1 / (1 - dropout_p))
        self._columns = index.columns.numpy()
        self._row_offsets = index.row_offsets.numpy()

    def pattern(self, head: int) -> list[Any]:
        """row_offsets, columns, block of a head."""
        rows = self._index.num_rows
        first = (head if self._index.num_heads > 1 else 0) * rows
        return [self._row_offsets[first : first + rows + 1], self._columns, self._index.block]

    def lengths(self) -> list[int]:
        """Of queries, keys and rows of q."""
        return [self.query_length, self.key_length, self.width]

    def rest(self, batch: int, head: int) -> list[Any]:
        """Biases, direction, scale and dropout of a head."""
        key_bias = _NOTHING if self._key_bias is None else self._key_bias[batch].numpy()
        bias = _bias_of(self._bias, batch, head)
        key = np.uint32(0 if self._keys is None else self._keys[batch * self.heads + head])
        return [key_bias, *bias, *self._numbers, key, self._threshold, self._kept]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: BlockIndex,
    key_bias: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Sq, D] like q, and float32 log-sum-exp [B, H, Sq], +inf where nothing is attended."""
    call = _Call(q, k, index, key_bias, bias, seed, causal, scale, dropout_p)
    out = torch.empty_like(q)
    results = out
    lse = torch.empty(q.shape[:3], dtype=torch.float32)
    threads = _workers.threads()
    heads = call.batch * call.heads
    # As many parts of a head as give every thread several: rows of blocks differ in what they attend.
    parts = 1 if heads % threads == 0 or heads >= 8 * threads else min(index.num_rows, -(-8 * threads // max(heads, 1)))
    if parts > 1:  # every part of a head would convert all of it
        q, k, v = q.float(), k.float(), v.float()
        results = _in_float32(out)

    def work(task: int) -> None:
        number, part = divmod(task, parts)
        batch, head = divmod(number, call.heads)
        result = _in_float32(results[batch, head])
        rows = [index.num_rows * edge // parts for edge in (part, part + 1)]
        arguments = [
            *_memory(q[batch, head], k[batch, head], v[batch, head]),
            *_memory(result),
            lse[batch, head].numpy(),
            *call.pattern(head),
            *rows,
            *call.lengths(),
            *call.rest(batch, head),
        ]
        forward_rows(*arguments)
        _copy_if_another(results[batch, head], result)

    _workers.each(work, heads * parts, threads)
    _copy_if_another(out, results)
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    index: BlockIndex,
    key_bias: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    needs_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, if asked for, of bias, in its shape."""
    if needs_d_bias and bias is not None:
        bias = bias.contiguous()
    call = _Call(q, k, index, key_bias, bias, seed, causal, scale, dropout_p)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_bias = torch.zeros_like(bias) if needs_d_bias and bias is not None else None
    groups = _heads_that_share(d_bias, call.batch, call.heads)

    def work(group: int) -> None:
        for batch, head in groups[group]:
            of_head = [one[batch, head] for one in gradients]
            results = [_in_float32(one).zero_() for one in of_head]
            arguments = [
                *_memory(*(one[batch, head] for one in (d_out, q, k, v, out))),
                lse[batch, head].numpy(),
                *_memory(*results),
                _bias_of(d_bias, batch, head)[0],
                *call.pattern(head),
                index.num_rows,
                *call.lengths(),
                *call.rest(batch, head),
            ]
            backward_head(*arguments)
            for target, result in zip(of_head, results, strict=True):
                _copy_if_another(target, result)

    _workers.each(work, len(groups), _workers.threads())
    return *gradients, d_bias


def _memory(*matrices: Tensor) -> list[Any]:
    """Of each [length, width]: its values as loops see them, flat float32, and the distance between rows."""
    arguments: list[Any] = []
    for matrix in matrices:
        if matrix.dtype != torch.float32 or matrix.stride(-1) != 1:
            matrix = matrix.float().contiguous()
        arguments += [_flat(matrix), matrix.stride(0)]
    return arguments


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    """The memory from a matrix's first element to its last, whatever its strides."""
    if tensor.numel() == 0:
        return _NOTHING
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).numpy()


def _in_float32(target: Tensor) -> Tensor:
    """Where loops may write what belongs to `target`: itself, if it is float32."""
    if target.dtype == torch.float32 and target.stride(-1) == 1:
        return target
    return torch.empty(target.shape, dtype=torch.float32)


def _copy_if_another(target: Tensor, result: Tensor) -> None:
    if target.data_ptr() != result.data_ptr():
        target.copy_(result)


def _bias_of(bias: Tensor | None, batch: int, head: int) -> tuple[NDArray[np.float32], int, int]:
    """A head's [Sq, Sk], flat: element (i, j) lies at i times the second plus j times the third."""
    if bias is None:
        return _NOTHING, 0, 0
    of_head = bias[batch if bias.size(0) > 1 else 0, head if bias.size(1) > 1 else 0]
    return _flat(of_head), of_head.stride(0), of_head.stride(1)


def _heads_that_share(d_bias: Tensor | None, batch: int, heads: int) -> list[list[tuple[int, int]]]:
    """All heads, those that add to the same part of `d_bias` together: one thread adds them up, in this order."""
    every = itertools.product(range(batch), range(heads))
    if d_bias is None:
        return [[one] for one in every]
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, head in every:
        groups.setdefault((number if d_bias.size(0) > 1 else 0, head if d_bias.size(1) > 1 else 0), []).append(
            (number, head)
        )
    return list(groups.values())
