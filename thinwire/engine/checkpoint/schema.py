"""Says in one line what pydantic has against values that were read from a file."""

from __future__ import annotations

from pydantic import ValidationError

__all__ = ["first_fault"]

_LONGEST_PLACE = 200


def first_fault(error: ValidationError, whole: str = "") -> str:
    """The first thing that is wrong, and where in `whole` it is."""
    detail = error.errors(include_input=False, include_url=False, include_context=False)[0]
    # Keys come from the file too, and may hold anything.
    parts = [part if isinstance(part, str) and part.isprintable() else repr(part) for part in detail["loc"]]
    place = ".".join(part for part in (whole, *parts) if part)
    return f"{place[:_LONGEST_PLACE]}: {detail['msg']}"
