"""What the documentation says in fences and in code spans, with the page and the line it stands on."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[^`]*)$")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands between the fences, and the line of the first of it, counted from 1."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def starts_anew(self) -> bool:
        """Whether it can be pasted by itself: what begins with an import can, what does not goes on from above."""
        return self.text.startswith(("import ", "from "))


def pages() -> list[Path]:
    """Every page that users read about this version; the changelog is about all."""
    found = [REPOSITORY / "README.md"]
    for folder in ("docs", "examples", "experiments"):
        found += sorted((REPOSITORY / folder).rglob("*.md"))
    return found


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order. Raises ValueError for a fence that nothing closes."""
    opened: re.Match[str] | None = None
    first, lines = 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, first, lines = fence, number + 1, []
        elif fence and fence["ticks"] == opened["ticks"] and not fence["language"]:
            yield Block(page, first, opened["language"].strip(), "".join(f"{one}\n" for one in lines))
            opened = None
        else:
            lines.append(line.removeprefix(opened["indent"]))
    if opened is not None:
        raise ValueError(f"{page}:{first - 1}: nothing closes this fence")


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every code span outside fences."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield from ((number, found) for found in SPAN.findall(line))
