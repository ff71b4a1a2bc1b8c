"""Logging by rank, as deepspeed.utils.logging has it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import cache

from thinwire.deepspeed import ranks as comm

# To standard output from INFO on, as DeepSpeed's, and not to the root logger too.
logger = logging.getLogger("DeepSpeed")
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stdout)
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks, [-1] for all; without ranks, only where none have met."""
    if (text := _of_rank(message, ranks)) is not None:
        logger.log(level, text)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print as `log_dist` logs."""
    if (text := _of_rank(message, ranks)) is not None:
        print(text, flush=True)


@cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """`log_dist` the first time only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Log from "debug", "info", "warning", "error" or "critical" on.

    Raises ValueError for another name.
    """
    known = logging.getLevelNamesMapping()
    if log_level_str.upper() not in known:
        raise ValueError(f"{log_level_str!r} is not a log level: give one of {', '.join(known).lower()}")
    (custom_logger or logger).setLevel(known[log_level_str.upper()])


def _of_rank(message: str, ranks: Sequence[int] | None) -> str | None:
    if not comm.is_initialized():
        return f"[Rank -1] {message}"
    rank = comm.get_rank()
    return f"[Rank {rank}] {message}" if ranks and (ranks[0] == -1 or rank in ranks) else None
