"""Which text is trained on, which is held out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.common.errors import InputError
from experiments.tasks.corpus import load, standard_library_files


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_standard_library_is_large_sorted_and_without_installed_packages() -> None:
    files = standard_library_files()
    assert files == sorted(files)
    assert any(path.name == "argparse.py" for path in files)
    assert not any("site-packages" in path.parts for path in files)


def test_standard_library_is_the_default_and_splits_by_files() -> None:
    corpus = load()
    assert sum(map(len, corpus.training)) > 5_000_000
    assert not set(corpus.training) & set(corpus.validation)
    share = len(corpus.validation) / (len(corpus.validation) + len(corpus.training))
    assert share == pytest.approx(0.05, abs=0.005)


def test_many_files_are_held_out_whole(tmp_path: Path) -> None:
    files = [write(tmp_path, f"{index:02}.txt", f"text number {index}") for index in range(45)]
    corpus = load(files)
    assert corpus.validation == ["text number 0", "text number 20", "text number 40"]
    assert len(corpus.training) == 42


def test_a_single_file_is_cut_between_words(tmp_path: Path) -> None:
    text = " ".join(f"word{index}" for index in range(1000))
    corpus = load([write(tmp_path, "one.txt", text)])
    assert corpus.training[0] + corpus.validation[0] == text
    assert corpus.validation[0].startswith(" word")
    assert len(corpus.validation[0]) == pytest.approx(len(text) / 20, rel=0.1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not text"),
        ("Zażółć gęślą jaźń".encode("utf-16"), "is not text"),
        ("Grüße".encode("latin-1"), "is not text"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    good, bad = write(tmp_path, "good.txt", "some text"), write(tmp_path, "bad.txt", content)
    with pytest.raises(InputError, match=rf"bad\.txt.*{complaint}"):
        load([good, bad])


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(InputError, match=f"{path.name} is not a file"):
            load([path])
