"""Finds a model by what a user calls it: a well-known name, a configuration on this machine, or its parameter count."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.plan.errors import PlanError
from thinwire.plan.models.families import FAMILIES, model_of
from thinwire.plan.models.known import KNOWN
from thinwire.plan.workload import Transformer

__all__ = ["MODELS", "named_model"]

MODELS = tuple(KNOWN)
"""Names that need no configuration."""

_LARGEST_CONFIGURATION = 1 << 20


def named_model(name: str) -> Transformer:
    """The model that a name or path means: a config.json or the folder it is in, one of `MODELS`, with or without its
    organisation, or a model in Hugging Face's cache on this machine. Nothing is downloaded.

    Families other than the formulas' are built by transformers, without memory for their weights.

    Raises PlanError for what is none of these, saying how to give it otherwise.
    """
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    short = name.rpartition("/")[2].lower()
    # A folder that happens to be called as a model is none.
    if path.is_file() or (path.suffix == ".json" and short not in KNOWN):
        return _described(path.parent.name or name if path.name == "config.json" else path.stem, path)
    cached = _in_cache(name)
    if cached is not None:
        return _described(short, cached)
    if short in KNOWN:
        return model_of(short, KNOWN[short])
    raise PlanError(_unknown(name, short))


def _described(name: str, path: Path) -> Transformer:
    configuration = _read(path)
    if configuration.get("model_type") in FAMILIES:
        return model_of(name, configuration)
    from thinwire.plan.models.built import built_model

    return built_model(name, path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _LARGEST_CONFIGURATION:
            raise PlanError(f"{path} is no configuration of a model: it is larger than 1 MiB")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise PlanError(f"the configuration {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"the configuration {path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise PlanError(f"{path} is no configuration of Hugging Face's: it has no model_type")
    return found


def _in_cache(name: str) -> Path | None:
    """Of the model's main revision, where it was downloaded once."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    found = folder / "snapshots" / revision / "config.json"
    return found if found.is_file() else None


def _unknown(name: str, short: str) -> str:
    alike = difflib.get_close_matches(short, MODELS, n=3)
    meant = f"Did you mean {' or '.join(alike)}? " if alike else ""
    organisation = name if "/" in name else f"ORGANISATION/{name}"
    return (
        f"model {name!r} is not known here, and not in Hugging Face's cache. {meant}Give its size, --parameters 340M; "
        f"or its configuration, --model path/to/config.json; or fetch that once: hf download {organisation} config.json"
    )
