"""A checkpoint has one name, whatever its ranks were told: which, where they were told different ones."""

from __future__ import annotations

import warnings

from thinwire.comm import Communicator

__all__ = ["TagError", "one_tag"]


class TagError(ValueError, AssertionError):
    """Ranks give a checkpoint several names. An AssertionError too, which DeepSpeed raises."""


def one_tag(comm: Communicator, tag: str, validation: str) -> str:
    """Rank 0's tag, on every rank. Collective.

    Where a rank has another one: with `validation` "Fail" TagError on every rank, with "Warn" a warning on rank 0.
    """
    tags = [one.decode() for one in comm.all_gather_bytes(tag.encode(errors="backslashreplace"), "save a checkpoint")]
    other = next((rank for rank, one in enumerate(tags) if one != tags[0]), None)
    if other is None or validation == "Ignore":
        return tags[0] if other is not None else tag
    what = f"rank {other} saves under the tag {tags[other]!r}, rank 0 under {tags[0]!r}"
    if validation == "Fail":
        raise TagError(f'{what}: give every rank the same, or set "checkpoint.tag_validation" to "Warn"')
    if comm.rank == 0:
        warnings.warn(f"{what}: all of the checkpoint goes under rank 0's", RuntimeWarning, stacklevel=5)
    return tags[0]
