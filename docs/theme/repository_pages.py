"""Makes links of the documentation work on the site as in a checkout: what they name outside docs/ comes along.

A hook of mkdocs. The repository's README is the home page. Every file of the repository that a page links to becomes a
page of the site (Markdown as it is, notebooks cell by cell, sources in a fence) or, as pictures do, a file beside it.
So the site needs no address of the repository, and no network.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)#\s]+)(?P<after>(?:#[^)\s]*)?\))")
OUTSIDE = re.compile(r"<(script|img|iframe|source|link)\b[^>]*?\b(src|href)=\"?(https?:)?//[^\s>]*", re.IGNORECASE)
SOURCES = {
    "": "text",
    ".ipynb": "python",
    ".json": "json",
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
}
"""The languages of what is shown as a page; all else, pictures above all, is a file that a page shows or leads to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and remember where each file of the repository went."""
    docs = Path(config.docs_dir)
    overview = files.get_file_from_path("README.md")
    assert overview
    files.remove(overview)  # its place is that of the home page
    places = {Path(str(file.abs_src_path)): file.src_uri for file in files.documentation_pages()}
    added = {docs.parent / "README.md": "index.md", docs / "README.md": "all-pages.md"}
    waiting = [*places, *added]
    while waiting:
        for found in _linked(waiting.pop()):
            outside = found.is_relative_to(docs.parent) and not found.is_relative_to(docs)
            if outside and found not in added:
                added[found] = _place(found.relative_to(docs.parent))
                waiting += [found] if found.suffix == ".md" else []
    for path, place in added.items():
        files.append(_made(config, place, path))
    config.extra["places"] = places | added
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where their files are on the site."""
    places: dict[Path, str] = config.extra["places"]
    origins = {place: path for path, place in places.items()}
    origin = origins.get(page.file.src_uri)
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if origin is not None and origin.suffix in SOURCES:
        page.meta["hide"] = ["navigation", "toc"]
    return markdown if origin is None else relinked(markdown, origin, page.file.src_uri, places)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that a reader without a network would not see whole."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} loads from elsewhere: {found[0]}")
    return output


def relinked(markdown: str, origin: Path, place: str, places: dict[Path, str]) -> str:
    """`markdown` of the file `origin`, shown at `place`, with links to files of `places` led there."""

    def lead(link: re.Match[str]) -> str:
        target = places.get(_resolve(origin, link["target"]))
        if target is None:
            return link[0]
        return f"{link['before']}{posixpath.relpath(target, posixpath.dirname(place) or '.')}{link['after']}"

    return LINK.sub(lead, markdown)


def shown(path: Path, name: str) -> str:
    """A source file, or a notebook, as Markdown."""
    if path.suffix != ".ipynb":
        return f"# {name}\n\n{_fenced(path.read_text(), SOURCES[path.suffix])}"
    cells = json.loads(path.read_text())["cells"]
    texts = (("".join(cell["source"]), cell["cell_type"]) for cell in cells)
    return "\n\n".join(_fenced(text, "python") if kind == "code" else text for text, kind in texts)


def _linked(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text()):
        if (found := _resolve(page, link["target"])).is_file():
            yield found


def _resolve(origin: Path, target: str) -> Path:
    return Path(posixpath.normpath(origin.parent / target))


def _place(name: Path) -> str:
    """Where a file of the repository goes: a folder's README under the folder's name, a source as a page."""
    if name.name == "README.md":
        name = name.parent.with_suffix(".md")
    shows_source = name.suffix in SOURCES
    return f"repository/{name.as_posix()}{'.md' if shows_source else ''}"


def _made(config: MkDocsConfig, place: str, path: Path) -> File:
    if path.suffix == ".md" or not place.endswith(".md"):
        return File.generated(config, place, abs_src_path=str(path))
    name = place.removeprefix("repository/").removesuffix(".md")
    return File.generated(config, place, content=shown(path, name))


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}\n"
