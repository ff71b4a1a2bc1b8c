"""What the fused kernels are measured against: copies and fills of memory, and the same work in eager torch."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

__all__ = ["cpu_copies", "cpu_fills", "eager_decode_mean", "eager_encode", "eager_encode_as_deepspeed"]

# Multiplying eight bytes of 0 or 1, read as one integer, by this leaves them as the bits of the top byte.
_GATHER_BITS = 0x0102040810204080


def cpu_copies(source: Tensor, target: Tensor) -> dict[str, Callable[[], None]]:
    """Ways to copy `source` over `target`, each on as many threads as torch uses; the fastest is the yardstick.

    Both are float32, whole blocks of 64 and 64-byte aligned, as torch allocates. The streaming copy needs numba: it
    writes past the caches, and so does not first read what it overwrites.
    """
    over_ranges = _shared_out(target)
    source_array, target_array = source.numpy(), target.numpy()

    def torch_copy() -> None:
        target.copy_(source)

    def numpy_copy() -> None:
        over_ranges(lambda first, last: np.copyto(target_array[first:last], source_array[first:last]))

    copies = {"copy, torch": torch_copy, "copy, numpy": numpy_copy}
    if importlib.util.find_spec("numba") is None:
        return copies
    streaming_copy = _compile_streaming_copy()

    def numba_copy() -> None:
        over_ranges(lambda first, last: streaming_copy(source_array, target_array, first, last))

    return {**copies, "copy, streaming": numba_copy}


def cpu_fills(target: Tensor) -> dict[str, Callable[[], None]]:
    """Ways to write `target`, as in `cpu_copies`, without reading anything; the yardstick of what nearly only writes.

    A processor may write alone more slowly than it reads and writes at once.
    """

    def torch_fill() -> None:
        target.fill_(1.0)

    fills = {"fill, torch": torch_fill}
    if importlib.util.find_spec("numba") is None:
        return fills
    over_ranges, streaming_fill, array = _shared_out(target), _compile_streaming_fill(), target.numpy()

    def numba_fill() -> None:
        over_ranges(lambda first, last: streaming_fill(array, first, last))

    return {**fills, "fill, streaming": numba_fill}


def _shared_out(target: Tensor) -> Callable[[Callable[[int, int], None]], None]:
    """What runs a function over ranges of the target's elements, whole blocks of 64, one on each of torch's threads."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    edges = [target.numel() * thread // threads // 64 * 64 for thread in range(threads)] + [target.numel()]
    ranges = list(itertools.pairwise(edges))

    def over_ranges(work: Callable[[int, int], None]) -> None:
        list(pool.map(lambda span: work(*span), ranges))

    return over_ranges


def _compile_streaming_copy() -> Callable[..., None]:
    import numba

    from thinwire.simd.floats import LANES, drain_streams, load, stream

    def streaming_copy(source: np.ndarray, target: np.ndarray, first: int, last: int) -> None:
        for i in range(first, last, LANES):
            stream(target, i, load(source, i))
        drain_streams()

    compiled: Callable[..., None] = numba.njit(nogil=True)(streaming_copy)
    return compiled


def _compile_streaming_fill() -> Callable[..., None]:
    import numba

    from thinwire.simd.floats import LANES, broadcast, drain_streams, stream

    def streaming_fill(target: np.ndarray, first: int, last: int) -> None:
        one = broadcast(np.float32(1.0))
        for i in range(first, last, LANES):
            stream(target, i, one)
        drain_streams()

    compiled: Callable[..., None] = numba.njit(nogil=True)(streaming_fill)
    return compiled


def eager_encode_as_deepspeed(payload: Tensor, residual: Tensor, packet: Tensor, block_size: int) -> None:
    """The sign1 encode, pass after pass as DeepSpeed's 1-bit backends ran it, but with a scale a block.

    payload, residual: float32 [n], both overwritten, n whole blocks. packet: uint8 [n / 8 + 4 · n / block_size].
    """
    payload.add_(residual)
    scales = torch.linalg.vector_norm(payload.view(-1, block_size), ord=1, dim=1) / block_size
    decoded = payload.sign().add_(1).bool().float().add_(-0.5).mul_(2.0).view(-1, block_size)
    torch.sub(payload, (scales.unsqueeze(1) * decoded).view(-1), out=residual)
    _store(packet, scales, _pack(payload.sign_().add_(1).bool()))


def eager_encode(payload: Tensor, residual: Tensor, packet: Tensor, block_size: int) -> None:
    """The sign1 encode in as few eager passes as we know; shapes as above, and `residual` is only read."""
    blocks = payload.add_(residual).view(-1, block_size)
    scales = torch.linalg.vector_norm(blocks, ord=1, dim=1) / block_size
    signs = blocks >= 0
    blocks.sub_(torch.where(signs, scales.unsqueeze(1), -scales.unsqueeze(1)))
    _store(packet, scales, _pack(signs))


def eager_decode_mean(packets: Tensor, output: Tensor, block_size: int) -> None:
    """The mean of sign1 packets, uint8 [workers, n / 8 + 4 · n / block_size], to `output`, float32 [n]."""
    blocks = output.view(-1, block_size)
    split = 4 * len(blocks)
    masks = 2 ** torch.arange(8, dtype=torch.uint8, device=packets.device)
    blocks.zero_()
    for packet in packets:
        scales = packet[:split].view(torch.float32).unsqueeze(1)
        signs = (packet[split:].unsqueeze(1) & masks).bool().view(-1, block_size)
        blocks.add_(torch.where(signs, scales, -scales))
    blocks.div_(len(packets))


def _pack(signs: Tensor) -> Tensor:
    """Bits of a boolean tensor, least significant first, eight a byte: two passes."""
    return signs.view(-1).view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def _store(packet: Tensor, scales: Tensor, codes: Tensor) -> None:
    split = 4 * scales.numel()
    packet[:split] = scales.view(torch.uint8)
    packet[split:] = codes
