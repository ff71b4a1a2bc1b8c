"""JSON as people write configurations by hand, which DeepSpeed takes as Hjson: comments, commas that are missing at a
line's end or left over at an object's, names and single words without quotes.

Of Hjson it leaves out what hides mistakes: a string without quotes may hold no comma, bracket, quote or comment, which
Hjson would take as its text, and none goes over several lines.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from thinwire.engine.config.errors import shown
from thinwire.engine.config.loading import DEEPEST

_SPACE = re.compile(r"[ \t\r\ufeff]+")
_COMMENT = re.compile(r"(?:#|//)[^\n]*|/\*.*?\*/", re.DOTALL)
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_NAME = re.compile(r"[^\s,:\[\]{}'\"#]+")
_REST_OF_LINE = re.compile(r"[^\n]*")
_PLAIN = re.compile(r"(?:(?!//|/\*)[^,\[\]{}'\"#\n])*")
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_MOST_DIGITS = 1000
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_WORDS = {"true": True, "false": False, "null": None}


class NotReadableError(ValueError):
    """A text that is no such JSON, or holds what no configuration does; the message has the place."""


def read_relaxed_json(text: str) -> Any:
    """The content of `text`, in time that grows as its length. Braces around it all may be missing.

    Raises NotReadableError with line and column, also where a name stands twice in an object, the nesting is deeper
    than any configuration's, or a number is beyond those of 64 bits.
    """
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._top_name = self._name = ""

    def read(self) -> Any:
        self._skip()
        without_braces = self._peek() not in ("{", "[") and self._begins_with_a_name()
        tree = self._members("", 1) if without_braces else self._value(1)
        self._skip()
        if self._at < len(self._text):
            raise self._error(f"nothing may follow, but there is {shown(self._text[self._at])}")
        return tree

    def _value(self, depth: int) -> Any:
        mark = self._peek()
        if mark in ("{", "["):
            if depth > DEEPEST:
                where = f"{shown(self._top_name)} is nested" if self._top_name else "it is nested"
                raise NotReadableError(
                    f"{where} more than {DEEPEST} deep, at line {self._line()}: nothing in a configuration is"
                )
            self._at += 1
            return self._members("}", depth) if mark == "{" else self._entries(depth)
        if mark in ('"', "'"):
            return self._quoted()
        return self._plain()

    def _members(self, end: str, depth: int) -> dict[str, Any]:
        """What stands in an object, up to `end`; to the end of the text where that is empty."""
        tree: dict[str, Any] = {}

        def member() -> None:
            begin = self._at
            name = self._quoted() if self._peek() in ('"', "'") else self._match(_NAME, "a name")
            if depth == 1:
                self._top_name = name
            self._skip()
            if self._peek() != ":":
                raise self._error(f"a colon must follow the name {shown(name)}")
            self._at += 1
            self._skip()
            self._name = name
            value = self._value(depth + 1)
            if name in tree:
                raise NotReadableError(
                    f"{shown(name)} is there twice in one object: {shown(tree[name])} and {shown(value)}, at line "
                    f"{self._text.count(chr(10), 0, begin) + 1}"
                )
            tree[name] = value

        self._each(end, member, "an object")
        return tree

    def _entries(self, depth: int) -> list[Any]:
        entries: list[Any] = []
        self._each("]", lambda: entries.append(self._value(depth + 1)), "a list")
        return entries

    def _each(self, end: str, read: Callable[[], None], kind: str) -> None:
        """Calls `read` at each thing up to `end`; between two of them stand a comma or the end of a line."""
        separated = True
        while True:
            separated |= self._skip()
            if self._at == len(self._text):
                if end:
                    raise self._error(f"the text ends inside {kind}: a {shown(end)} is missing")
                return
            if self._peek() == end:
                self._at += 1
                return
            if not separated:
                raise self._error(f"{shown(self._peek())} must come after a comma or on a new line")
            read()
            separated = self._skip()
            if self._peek() == ",":
                self._at += 1
                separated = True

    def _quoted(self) -> str:
        if self._text.startswith("'''", self._at):
            raise self._error("a text over several lines is no value of a configuration")
        token = self._match(_QUOTED, "a string that ends on its line")
        if token[0] == "'":
            inside = token[1:-1].replace("\\'", "'")
            token = '"' + re.sub(r'(\\.)|"', lambda found: found[1] or '\\"', inside) + '"'
        try:
            return str(json.loads(token))
        except json.JSONDecodeError as error:
            raise self._error(f"{error.msg}, in a string that ends here") from None

    def _plain(self) -> Any:
        """A number, true, false, null, or a string without quotes."""
        begin = self._at
        found = _PLAIN.match(self._text, begin)
        assert found is not None, "it matches nothing, too"
        ends = self._text[found.end() : found.end() + 1] not in tuple("[{'\"")
        token = found[0].rstrip(" \t\r") if ends else ""
        self._at = begin + len(token)
        if token in _WORDS:
            return _WORDS[token]
        if _WHOLE.match(token):
            return int(token[:_MOST_DIGITS])  # is refused by its name, however many digits there are
        if _NUMBER.match(token):
            if math.isinf(number := float(token)):
                raise NotReadableError(
                    f"{shown(self._name)} is {shown(token)}, at line {self._line()}: it must be a number, and the "
                    f"largest is {sys.float_info.max:.3g}"
                )
            return number
        if token in _NO_NUMBERS:
            raise self._error(f"{token} is not JSON: write a number")
        line = _REST_OF_LINE.match(self._text, begin)
        rest = line[0].rstrip() if line is not None else ""
        if not rest or rest[0] in ",]}":
            raise self._error("a value is missing" + (f" before {shown(rest[0])}" if rest else ""))
        if token != rest:
            self._at = begin
            raise self._error(f"{shown(rest)} is no value: a comma is missing, or quotes around a string")
        return token

    def _skip(self) -> bool:
        """Go past spaces and comments; returns whether a line ended there."""
        begin = self._at
        while self._at < len(self._text):
            if self._text[self._at] == "\n":
                self._at += 1
            elif (found := _SPACE.match(self._text, self._at) or _COMMENT.match(self._text, self._at)) is not None:
                self._at = found.end()
            elif self._text.startswith("/*", self._at):
                raise self._error("this comment does not end: a */ is missing")
            else:
                break
        return "\n" in self._text[begin : self._at]

    def _begins_with_a_name(self) -> bool:
        found = _QUOTED.match(self._text, self._at) or _NAME.match(self._text, self._at)
        return found is not None and re.compile(r"\s*:").match(self._text, found.end()) is not None

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        if (found := pattern.match(self._text, self._at)) is None:
            raise self._error(f"{expected} must stand here")
        self._at = found.end()
        return found[0]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, message: str) -> NotReadableError:
        column = self._at - (self._text.rfind("\n", 0, self._at) + 1) + 1
        return NotReadableError(f"is not JSON, at line {self._line()} column {column}: {message}")
