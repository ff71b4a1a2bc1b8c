"""Every key of a configuration stands in exactly one of three tables: it has an effect (the models), it cannot change a
result, or it would and is refused unless it asks for what happens anyway. Any other is an error that names the nearest
known key. And "auto", as Hugging Face writes it: whoever fills it in has done so before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from thinwire.engine.config.declined import DECLINED
from thinwire.engine.config.errors import did_you_mean, dotted, left_auto
from thinwire.engine.config.models import EngineConfig, Section
from thinwire.engine.config.without_effect import WITHOUT_EFFECT

__all__ = ["AUTO", "keep_known_keys"]

# What is "auto" in files for Hugging Face's Trainer, which fills it in; so are values in optimizer.params and
# scheduler.params.
AUTO = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)

# Where "auto" is a value like others.
_AUTO_VALUES = frozenset({"progressive_layer_drop.gamma"})

# Not a field, since one bucket size serves both ways: checked against reduce_bucket_size.
_OTHER_KNOWN = frozenset({"zero_optimization.allgather_bucket_size"})


def keep_known_keys(tree: Mapping[str, Any], without_effect: dict[str, str], problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` with only the keys that have an effect.

    The paths of those that cannot change a result join `without_effect`, with the reason; what is wrong with the others
    joins `problems`. Null sections are left out.
    """
    return _keep(tree, "", EngineConfig, without_effect, problems)


def _keep(
    tree: Mapping[str, Any],
    prefix: str,
    model: type[Section],
    without_effect: dict[str, str],
    problems: list[str],
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        path = dotted(prefix, str(key))
        declined = DECLINED.get(path)
        section = _section_of(model, key)
        auto = isinstance(value, str) and value == "auto"
        if auto and path in AUTO:
            problems.append(left_auto(path))
        elif path in WITHOUT_EFFECT:
            if value is not None:
                _note(path, value, without_effect, problems)
        elif declined is not None:
            if value is not None and not declined.accepts(value):
                problems.append(declined.refusal(path, value))
        elif not isinstance(key, str) or (key not in model.model_fields and path not in _OTHER_KNOWN):
            problems.append(_unknown(path, prefix, str(key), model))
        elif auto and path not in _AUTO_VALUES:
            problems.append(f'"{path}" cannot be "auto": write the value, or delete the key for the default')
        elif section is not None and value is None:
            continue
        elif section is not None and isinstance(value, Mapping):
            kept[key] = _keep(value, path, section, without_effect, problems)
        else:
            kept[key] = value
    return kept


def _note(path: str, value: Any, without_effect: dict[str, str], problems: list[str]) -> None:
    known = WITHOUT_EFFECT[path]
    if (problem := known.problem(path, value)) is not None:
        problems.append(problem)
    else:
        without_effect[path] = known.why


def _unknown(path: str, prefix: str, key: str, model: type[Section]) -> str:
    known = [*model.model_fields]
    not_fields = [
        other.rpartition(".")[2]
        for other in (*DECLINED, *WITHOUT_EFFECT, *_OTHER_KNOWN)
        if other.rpartition(".")[0] == prefix
    ]
    elsewhere = [other for other in _all_paths("", EngineConfig) if other.rpartition(".")[2] == key and other != path]
    if elsewhere:
        hint = " It belongs at " + " or ".join(f'"{other}"' for other in elsewhere) + "."
    else:
        hint = did_you_mean(key, known, not_fields)
    return f'"{path}" is not a known key.{hint}'


def _all_paths(prefix: str, model: type[Section]) -> Iterator[str]:
    for key in model.model_fields:
        path = dotted(prefix, key)
        yield path
        if (section := _section_of(model, key)) is not None:
            yield from _all_paths(path, section)


def _section_of(model: type[Section], key: Any) -> type[Section] | None:
    """The model of `key`'s value, where that is an object of its own; `optimizer.params` and the like are not."""
    field = model.model_fields.get(key) if isinstance(key, str) else None
    if field is None:
        return None
    candidates = get_args(field.annotation) or (field.annotation,)
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Section)), None)
