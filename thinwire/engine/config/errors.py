"""Sentences about a bad configuration: the full dotted path, what was given, what is expected, the nearest known name.

Pydantic's list of errors becomes such sentences here, in one place, so that all checks read alike.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from thinwire.engine.errors import printable

AUTO = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)
"""Keys that are "auto" in files for Hugging Face's Trainer, which fills them in; so are values in optimizer.params and
scheduler.params."""

_Model = TypeVar("_Model", bound=BaseModel)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): "null"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "strings"}
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "a multiple of {}",
    "min_length": "not empty",
    "max_length": "of at most {}",
}
"""By the names of annotated_types, whose objects hold one each."""

_LEAST_SIMILARITY = 0.6
_LONGEST_VALUE = 80
_LONGEST_REASON = 500
_LONGEST_PROBLEM = 1000
_LONGEST_LIST = 3 * _LONGEST_PROBLEM

MOST_PROBLEMS = 20
"""So many are told in whole sentences, which take time to find; of others only the number is."""


class ConfigError(ValueError):
    """A configuration that cannot work. `problems` holds one sentence for each thing that is wrong with it, `told` as
    many of them as a message has room for: of 4,000 characters at most, whatever a file holds, and all printable."""

    def __init__(self, problems: str | Sequence[str], source: str = "the configuration") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.told: list[str] = []
        for one in self.problems[:MOST_PROBLEMS]:
            one = _in_one_line(one, _LONGEST_PROBLEM)
            if self.told and sum(map(len, self.told)) + len(one) > _LONGEST_LIST:
                break
            self.told.append(one)
        source = _in_one_line(source, _LONGEST_REASON)
        if more := len(self.problems) - len(self.told):
            self.told.append(f"and {more} more")
        if len(self.problems) == 1:
            message = f"{source}: {self.told[0]}"
        else:
            message = f"{source} has {len(self.problems)} problems:" + "".join(f"\n- {one}" for one in self.told)
        super().__init__(message)


def validated(
    model: type[_Model],
    tree: Mapping[str, Any],
    path: str,
    problems: list[str],
    owner: str = "",
    unlisted: frozenset[str] = frozenset(),
) -> _Model | None:
    """`tree`, which stands at `path`, as `model`; None with a sentence in `problems` for each thing that is wrong.

    `owner`: of the parameters that `tree` holds, an optimizer or a schedule. `unlisted`: paths of further keys that
    may have been meant.
    """
    try:
        return model.model_validate(dict(tree))
    except ValidationError as error:
        reader = _Reader(model, tree, path, owner, unlisted)
        # One for each field: a long list has an error for each entry.
        first = {tuple(reader.place(detail["loc"])[0]): detail for detail in reversed(error.errors(include_url=False))}
        for detail in reversed(first.values()):
            problems.append(reader.sentence(detail) if len(problems) < MOST_PROBLEMS else detail["msg"])
        return None


@dataclass(frozen=True)
class _Reader:
    """Pydantic's errors about a tree, as sentences."""

    model: type[BaseModel]
    tree: Mapping[str, Any]
    path: str
    owner: str
    unlisted: frozenset[str]

    def sentence(self, detail: ErrorDetails) -> str:
        """One error as a sentence."""
        names, section, field = self.place(detail["loc"])
        path = dotted(self.path, *names)
        if detail["type"] == "value_error" and not names:
            return f'"{path}" cannot work: {detail["msg"].removeprefix("Value error, ")}'
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            return self._unknown(path, dotted(*names[:-1]), names[-1], section)
        if detail["type"] == "missing" and len(names) == len(detail["loc"]):
            return f'"{path}" is missing' + (f": {self.owner} needs it" if self.owner else "")
        value: Any = self.tree
        for name in names:
            value = value[name]
        if isinstance(value, str) and value == "auto" and (self.owner or path in AUTO):
            return left_auto(path)
        if field is None:
            return f'"{path}" must be {detail["msg"]}, got {shown(value)}'
        if field.description is not None:
            return f'"{path}" can only be {expected(field)}, got {shown(value)}: {field.description}'
        return f'"{path}" must be {expected(field)}, got {shown(value)}'

    def place(self, location: tuple[int | str, ...]) -> tuple[list[str], type[BaseModel], FieldInfo | None]:
        """(The names on the way to the field, the model of its section, the field); of an entry of a list, the list.

        If a field takes one of several types, pydantic's location goes on with each type, which is no name.
        """
        inside: type[BaseModel] | None = self.model
        section, field, names = self.model, None, list[str]()
        for part in location:
            if inside is None:
                break
            section, field = inside, inside.model_fields.get(str(part))
            names.append(str(part))
            inside = None if field is None else section_of(field)
        return names, section, field

    def _unknown(self, path: str, prefix: str, key: str, section: type[BaseModel]) -> str:
        known = [name for name, field in section.model_fields.items() if field.description is None]
        whole = dotted(self.path, prefix)
        hidden = [other.rpartition(".")[2] for other in self.unlisted if other.rpartition(".")[0] == whole]
        if self.owner:
            return f'"{path}" is not a parameter of {self.owner}.{did_you_mean(key, known, hidden)}'
        elsewhere = [one for one in _all_paths("", self.model) if one.rpartition(".")[2] == key and one != path]
        if elsewhere:
            return f'"{path}" is not a known key. It belongs at ' + " or ".join(f'"{one}"' for one in elsewhere) + "."
        return f'"{path}" is not a known key.{did_you_mean(key, known, hidden)}'


def expected(field: FieldInfo) -> str:
    """Words for the values that a field takes, as "a whole number, at least 1"."""
    return " or ".join(_words(one) for one in _alternatives(field.annotation)) + _bounds(field.metadata)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inside, *metadata = get_args(annotation)
        return _words(inside) + _bounds(metadata)
    if origin is Literal:
        return " or ".join(shown(choice) for choice in get_args(annotation))
    if origin is tuple:
        first = get_args(annotation)[0]
        bounds = _bounds(get_args(first)[1:]) if get_origin(first) is Annotated else ""
        return f"a list of {len(get_args(annotation))} numbers{bounds}"
    if origin is list:
        kind = get_args(annotation)[0]
        return f"a list of {_PLURALS[get_args(kind)[0] if get_origin(kind) is Annotated else kind]}"
    if origin in (Mapping, dict) or (isinstance(annotation, type) and issubclass(annotation, BaseModel | Mapping)):
        return "an object, {...}"
    return _WORDS[annotation]


def _bounds(metadata: Iterable[Any]) -> str:
    bounds = ""
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            bounds += _bounds(bound.metadata)
        for name, words in _BOUNDS.items():
            if hasattr(bound, name):
                bounds += f", {words.format(getattr(bound, name))}"
    return bounds


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field's value, if that is an object of its own; `optimizer.params` and the like are not."""
    for one in _alternatives(field.annotation):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _all_paths(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for key, field in model.model_fields.items():
        path = dotted(prefix, key)
        yield path
        if (section := section_of(field)) is not None:
            yield from _all_paths(path, section)


def dotted(*parts: str) -> str:
    """The path of a key as people write it: `fp16.loss_scale`, without the empty parts; long ones are shortened."""
    return ".".join(_shortened(part) for part in parts if part)


def left_auto(path: str) -> str:
    """The sentence that refuses an "auto" that was not filled in."""
    return (
        f'"{path}" is "auto", which is filled in only by thinwire.hugging_face.Trainer(thinwire_config=...), from '
        "TrainingArguments: write the value, or delete the key for the default"
    )


def shown(value: Any) -> str:
    """`value` as JSON writes it, shortened where it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        try:
            text = repr(value)
        except Exception:  # of an object that the caller put there: its type says enough
            text = f"a {type(value).__name__}"
    return _shortened(text)


def reason(error: Exception) -> str:
    """What `error` says, shortened where it echoes a long value."""
    return _shortened(str(error), _LONGEST_REASON)


def did_you_mean(name: str, known: Sequence[str], unlisted: Iterable[str] = ()) -> str:
    """' Did you mean "..."?' for the most similar of `known` and `unlisted`; where none is similar, lists `known`."""
    name = _shortened(name)  # comparing takes the square of a name's length
    similar = [other for other in sorted({*known, *unlisted}) if _ratio(name, other) >= _LEAST_SIMILARITY]
    if not similar:
        return f" Known here: {', '.join(known)}." if known else ""
    # Two swapped letters look like two errors to difflib; compared without their order, they are none.
    likeness = [
        _ratio(name, other) + _ratio(*("".join(sorted(one.lower())) for one in (name, other))) for other in similar
    ]
    nearest = [f'"{other}"' for other, like in zip(similar, likeness, strict=True) if like == max(likeness)]
    return f" Did you mean {' or '.join(nearest)}?"


def _shortened(text: str, longest: int = _LONGEST_VALUE) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _in_one_line(text: str, longest: int) -> str:
    return _shortened(printable(_shortened(text, longest)).replace("\n", "\\n"), longest)


def _ratio(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
