"""deepspeed.runtime.config_utils: the base class of sections of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from thinwire.deepspeed.usage_error import DeepSpeedUsageError

__all__ = ["DeepSpeedConfigModel"]


class DeepSpeedConfigModel(BaseModel):
    """A section of a configuration: unknown keys are errors, and fields are known by name and alias.

    A field whose `json_schema_extra` has "deprecated": True gives its value to the field "new_param", through the
    function "new_param_fn" where there is one.

    Raises pydantic's ValidationError, a ValueError; DeepSpeedUsageError where an old and its new field are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, **given: Any) -> None:
        super().__init__(**self._without_deprecated(given))

    @classmethod
    def _without_deprecated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`given`, the values of deprecated fields handed over to those that took their places."""
        given = dict(given)
        for old, field in cls.model_fields.items():
            about = field.json_schema_extra
            new = about.get("new_param") if isinstance(about, dict) and about.get("deprecated") else None
            if old not in given or not isinstance(about, dict) or not isinstance(new, str):
                continue
            if new in given:
                raise DeepSpeedUsageError(f"both {old!r}, which is deprecated, and {new!r} are given: remove {old!r}")
            change: Any = about.get("new_param_fn", lambda value: value)
            given[new] = change(given[old])
        return given
