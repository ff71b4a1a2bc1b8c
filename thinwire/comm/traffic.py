"""The bytes that a rank sends in a collective, so that a claim about compression is measured and not assumed: what a
bandwidth-optimal algorithm makes it send, whatever algorithm the backend runs. No torch, as a plan counts them too."""

from __future__ import annotations


def sent_bytes(collective: str, nbytes: int, size: int) -> int:
    """Bytes one of ``size`` ranks sends in ``collective`` over an input of ``nbytes`` bytes, rounded up.

    all_to_all and broadcast send (W-1)/W n, all_reduce 2(W-1)/W n, and the gathering ones (all_gather,
    all_gather_bytes, barrier) (W-1)n.
    """
    if collective == "all_reduce":
        return -(-2 * (size - 1) * nbytes // size)
    if collective in ("all_to_all", "broadcast"):
        return -(-(size - 1) * nbytes // size)
    return (size - 1) * nbytes
