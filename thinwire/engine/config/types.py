"""Says in our words what pydantic finds: the path of the key, what it must be, and what was given."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from thinwire.engine.config.errors import dotted, shown
from thinwire.engine.config.models import EngineConfig, Section

__all__ = ["explain"]

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}


def explain(error: ValidationError) -> list[str]:
    """One sentence for each thing that is wrong with an `EngineConfig`, in the order of its keys."""
    return list(dict.fromkeys(_sentence(detail) for detail in error.errors()))


def _sentence(detail: ErrorDetails) -> str:
    names, field = _field(detail["loc"])
    path = dotted(*names)
    if detail["type"] == "missing":
        return f'"{path}" is missing'
    expected = _expected(field) if field is not None else detail["msg"]
    return f'"{path}" must be {expected}, got {shown(detail["input"])}'


def _field(location: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None]:
    """(The names on the way, the field at the end of it); for an entry of a list, the list's field.

    Where a field takes one of several types, pydantic's location goes on with each type, which is no name.
    """
    model: type[Section] = EngineConfig
    field: FieldInfo | None = None
    names: list[str] = []
    for part in location:
        if isinstance(part, str) and part not in model.model_fields:
            break
        names.append(str(part))
        if isinstance(part, int):
            continue
        field = model.model_fields[part]
        sections = [
            one for one in _alternatives(field.annotation) if isinstance(one, type) and issubclass(one, Section)
        ]
        model = sections[0] if sections else Section
    return names, field


def _expected(field: FieldInfo) -> str:
    return " or ".join(_words(one) for one in _alternatives(field.annotation)) + _bounds(field)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inside, *metadata = get_args(annotation)
        return _words(inside) + "".join(_bounds(one) for one in metadata if isinstance(one, FieldInfo))
    if origin is Literal:
        return " or ".join(shown(choice) for choice in get_args(annotation))
    if origin is list:
        return "a list of strings"
    if origin is Mapping or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return "an object, {...}"
    return _WORDS[annotation]


def _bounds(field: FieldInfo) -> str:
    bounds = []
    for bound in field.metadata:
        match bound:
            case annotated_types.Ge(ge=low):
                bounds.append(f"at least {low}")
            case annotated_types.Gt(gt=low):
                bounds.append(f"above {low}")
            case annotated_types.Le(le=high):
                bounds.append(f"at most {high}")
            case annotated_types.Lt(lt=high):
                bounds.append(f"below {high}")
            case annotated_types.MinLen():
                bounds.append("not empty")
    return "".join(f", {bound}" for bound in bounds)
