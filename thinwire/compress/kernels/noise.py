"""Random bits that depend on a seed and an element's number only: the same on every rank, device and backend,
whatever the order of the elements, so that replicas of a weight that are rounded at random stay replicas.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["MASK", "MULTIPLIERS", "SHIFTS", "keys", "random_bits"]

MASK = 0xFFFFFFFF

# A multiplication that spreads the count over the word, then two rounds of xor-shift and multiplication, of the
# well-studied kind that finishes a hash. Below 2^31, so that a product of one with 32 bits is exact in int64.
MULTIPLIERS = (0x1E3779B9, 0x21F0AAAD, 0x735A2D97)
SHIFTS = (16, 15, 15)


def keys(seed: int) -> tuple[int, int]:
    """Two 32-bit keys from a seed modulo 2^64, by SplitMix64: seeds that differ in one bit give unrelated keys."""
    wide = 0xFFFFFFFFFFFFFFFF
    mixed = (seed + 0x9E3779B97F4A7C15) & wide
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & wide
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & wide
    mixed ^= mixed >> 31
    return mixed & MASK, mixed >> 32


def random_bits(seed: int, numbers: Tensor) -> Tensor:
    """16 random bits, int64 in [0, 65536), for each element number, int64 of any shape, modulo 2^33.

    Elements 2k and 2k + 1 get the lower and the upper half of a bijection of k. So for any seed every value comes
    exactly 131072 times among 2^33 consecutive elements, and what is rounded with them is unbiased. Adequate for
    rounding, not for cryptography.
    """
    first_key, second_key = keys(seed)
    bits = ((numbers >> 1 & MASK) * MULTIPLIERS[0] & MASK) ^ first_key
    bits = ((bits ^ bits >> SHIFTS[0]) * MULTIPLIERS[1] & MASK) ^ second_key
    bits = (bits ^ bits >> SHIFTS[1]) * MULTIPLIERS[2] & MASK
    bits = bits ^ bits >> SHIFTS[2]
    return bits >> 16 * (numbers & 1) & 0xFFFF
