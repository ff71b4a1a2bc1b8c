"""What the experiments' command lines share: complaints by exception, and checked numbers."""

from __future__ import annotations

import argparse
from typing import Literal, NoReturn

from experiments.common.errors import InputError

__all__ = ["Parser", "fraction", "freeze_step", "positive", "rate", "seed"]


class Parser(argparse.ArgumentParser):
    """Raises `InputError` instead of leaving the program, so that one rank speaks for all."""

    def __init__(self, module: str, description: str, takes: str | None = None) -> None:
        """A parser for `python -m module`, whose help shows the defaults there are and how long it `takes`."""
        description += f" Takes {takes}." if takes else ""
        super().__init__(prog=f"python -m {module}", description=description, formatter_class=_Help, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuses the command line."""
        raise InputError(f"{message} (see --help)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seed(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def rate(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def fraction(text: str) -> float:
    """A number from 0 to below 1."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def freeze_step(text: str) -> int | Literal["auto"]:
    """The word "auto", or a whole number of at least 1."""
    return "auto" if text == "auto" else positive(text)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where leaving the option out means something that its help explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)
