"""Fused kernels that turn float32 vectors into packets and back, in one pass over memory.

A packet row is 16 header bytes that no kernel touches, the float32 scales of one block after the other, then the codes
of one block after the other:

- "sign1": scale mean |u|; a bit an element, least significant first, 1 where u >= 0.
- "stat2": split at 0.98 root mean squares of the block; scales the mean |u| below the split, 0 where there is none, and
  the mean |u| of the rest; the signs' bits of the whole block, then as many bits, 1 where |u| is at the split or above.
- "int4", "int8": scale max |u| / 7 and / 127; u / scale to the nearest integer, ties to even; "int4" has two in a byte,
  the first in its lower half.
- "fp8": scale max |u| / 448; u / scale to the nearest e4m3 number, as torch.float8_e4m3fn has them. The sign of zero
  stays; to the others -0 is 0.

`packets` has the shape [rows, packet_bytes]; a row carries a shard, which is a whole number of blocks; `numel` counts
the valid elements over all rows laid end to end, and what lies beyond it is padding. `block_size` is of the elements
that share their scales: a codec's `scale_block`.

A row may also carry a part of its shard, the same of every shard, in whole blocks: see `buckets.Part`.
"""
