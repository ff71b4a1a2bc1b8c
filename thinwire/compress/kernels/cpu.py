"""The CPU backend: shares the blocks of a call out to a few threads that run compiled loops without the GIL."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.cpu_kernels import DECODE, ENCODE

__all__ = ["decode", "decode_mean", "encode"]

_NO_RESIDUAL = np.empty(0, dtype=np.float32)

# Below this many elements a thread, handing work over takes longer than doing it.
_ELEMENTS_PER_THREAD = 1 << 17

# Outputs that the caches cannot hold are written past them: a store through the cache first reads the line.
_STREAM_ELEMENTS = 1 << 22
_STREAM_ALIGNMENT = 64


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode`."""
    kernel = ENCODE[codec]
    payload_array = _array(payload)
    residual_array = _NO_RESIDUAL if residual is None else _array(residual)
    rows, row_bytes = packets.shape
    row_blocks = payload.numel() // rows // block_size
    flat = _array(packets).reshape(-1)

    def work(first: int, last: int) -> None:
        kernel(payload_array, residual_array, flat, first, last, numel, block_size, row_blocks, row_bytes)

    _workers.share(work, row_blocks * rows, block_size)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Decode every row; see `thinwire.compress.kernels.decode`."""
    _decode(codec, packets, output, numel, block_size, groups=packets.size(0))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Average the rows; see `thinwire.compress.kernels.decode_mean`."""
    _decode(codec, packets, output, numel, block_size, groups=1)


def _decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int, groups: int) -> None:
    """Fill `groups` equal parts of `output`, each with the mean of as many consecutive rows of `packets`."""
    kernel = DECODE[codec]
    rows, row_bytes = packets.shape
    row_blocks = output.numel() // groups // block_size
    streaming = output.numel() >= _STREAM_ELEMENTS and output.data_ptr() % _STREAM_ALIGNMENT == 0
    flat, output_array = _array(packets).reshape(-1), _array(output)

    def work(first: int, last: int) -> None:
        kernel(
            flat,
            output_array,
            first,
            last,
            numel,
            block_size,
            row_blocks,
            row_bytes,
            rows // groups,
            streaming,
        )

    _workers.share(work, row_blocks * groups, block_size)


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().numpy()


class _Workers:
    """Threads that share out the blocks of one call, the caller's among them.

    Nothing that runs on them waits for another, so any number of Python threads may call at once.
    """

    def __init__(self) -> None:
        self._start()
        os.register_at_fork(after_in_child=self._start)  # threads do not survive a fork

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="thinwire-kernel")

    def share(self, work: Callable[[int, int], None], blocks: int, block_size: int) -> None:
        """Run work(first, last) over ranges that cover `blocks`, on at most torch.get_num_threads() threads."""
        threads = max(1, min(torch.get_num_threads(), blocks * block_size // _ELEMENTS_PER_THREAD))
        edges = [blocks * part // threads for part in range(threads + 1)]
        futures = [self._pool.submit(work, edges[part], edges[part + 1]) for part in range(1, threads)]
        work(edges[0], edges[1])
        for future in futures:
            future.result()


_workers = _Workers()
