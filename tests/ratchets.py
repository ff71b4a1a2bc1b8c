"""What the house measures of itself, and may only get better: journeys, lines, files, sizes of classes, names, words.

`recorded.json` beside this module holds the values; a test fails if one has grown. After a change that lowers some:
    python -m tests.ratchets        record the lower values; what has grown stays as it was, and is named
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thinwire"
RECORDED = Path(__file__).with_name("recorded.json")

MOST_METHODS = 25
MOST_MEMBERS_OF_AN_ALGORITHM = 12
MOST_BASES = 2
FEWEST_LINES = 60

# Names of an algorithm's state, which a home or a bucket has no business with.
STATE_NAMES = re.compile(r"[\"'](exp_avg|exp_avg_sq|denominator|mean_momentum|momentum_buffer|fresh_exp_avg_sq)[\"']")
HOMES_AND_BUCKETS = re.compile(r"optim/(sharded|replicated|bucket|storage|checkpoint|home|step)[^/]*(/|\.py)")
PEER = re.compile(r"deepspeed|\bds_", re.IGNORECASE)
# A private dialect, beside the word of the field.
DIALECT = {
    "cohort": "freeze group",
    "masters": "master weights",
    "guilty": "overflowing ranks",
    "lean": "low-memory",
    "hear(?:s|d|ing)?": "read, gather",
    "bring(?:s|ing)? home": "wait for averages",
    "stand(?:s|ing)? apart": "copy on write",
    "somebody": "a caller, a user, a rank",
    "nobody": "no caller, no user, no rank",
    "under way": "in flight",
}
KINDS = ("files", "functions")
# Of these alone returns are counted: threads that save take turns as they like.
STAGES = ("stage 0", "stage 1")
QUESTIONS = re.compile(r"\s*(What|Which|How|Where|Who|Whether)\b")


def measure(journeys: str | None = sys.executable) -> dict[str, dict[str, int]]:
    """Every value by rule and name; those of journeys by the Python that is named, if one is."""
    return {
        "files of a room": dict(Counter(room_of(path) for path in files())),
        "lines of a room": lines_of_rooms(),
        "methods of a class": dict(large_classes()),
        "members of an algorithm": dict(algorithms()),
        "bases of a class": dict(deep_classes()),
        "classes of one name": {name: count for name, count in class_names().items() if count > 1},
        "small modules with one importer": dict.fromkeys(small_modules(), 1),
        "docstrings that refer elsewhere": {"thinwire": sum(1 for text in docstrings() if text.startswith("See "))},
        "modules that name the peer": dict.fromkeys(modules_with(PEER, but="deepspeed"), 1),
        "homes that name an algorithm's state": dict.fromkeys(homes_with_state(), 1),
        "heads that ask": {"thinwire": sum(1 for text in heads() if QUESTIONS.match(text))},
        "dialect": dict(dialect()),
        "words of the documentation": {
            "docs": sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
        },
        "lines of tests": {"tests": sum(lines(path) for path in (ROOT / "tests").rglob("*.py"))},
        **(measured_journeys(journeys) if journeys else {}),
    }


def grown(measured: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """A line for every value that is higher than recorded, or new."""
    return [
        f"{rule}: {name}: {value}, recorded {recorded[rule].get(name, 'none')}"
        for rule, values in measured.items()
        for name, value in sorted(values.items())
        if value > recorded[rule].get(name, 0)
    ]


@cache
def files() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "doors"


def lines(path: Path) -> int:
    return path.read_text().count("\n")


def lines_of_rooms() -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for path in files():
        found[room_of(path)] += lines(path)
    return dict(found)


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in files():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                yield path, node


def methods(node: ast.ClassDef) -> list[str]:
    """Names of methods and properties; a setter is not another one."""
    return sorted({one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)})


def large_classes() -> Iterator[tuple[str, int]]:
    for path, node in classes():
        count = len(methods(node))
        if count > MOST_METHODS:
            yield f"{name_of(path)}: {node.name}", count


def algorithms() -> Iterator[tuple[str, int]]:
    """Public members that `Algorithm` declares."""
    for _, node in classes():
        if node.name == "Algorithm":
            declared = {
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            }
            yield node.name, len({one for one in {*methods(node), *declared} if not one.startswith("_")})


def deep_classes() -> Iterator[tuple[str, int]]:
    bases = {node.name: [ast.unparse(one).split("[")[0].split(".")[-1] for one in node.bases] for _, node in classes()}

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases[name] if base in bases and base != name), default=0)

    for path, node in classes():
        if depth(node.name) > MOST_BASES:
            yield f"{name_of(path)}: {node.name}", depth(node.name)


def class_names() -> Counter[str]:
    """Public classes by name; those of mirrored backends count once."""
    mirrored = re.compile(r"kernels/(cpu|cuda|triton)/")
    found = {
        (node.name, mirrored.sub("kernels/", name_of(path)).partition("kernels/")[1] or name_of(path))
        for path, node in classes()
    }
    return Counter(name for name, _ in found if not name.startswith("_"))


def small_modules() -> list[str]:
    importers: dict[str, set[Path]] = defaultdict(set)
    modules = {module_of(path): path for path in files()}
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{one.name}" for one in node.names)):
                    importers[name].add(path)
            elif isinstance(node, ast.Import):
                for one in node.names:
                    importers[one.name].add(path)
    small = [name for name, path in modules.items() if lines(path) < FEWEST_LINES and path.name != "__init__.py"]
    return sorted(name for name in small if len(importers[name]) == 1)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def docstrings() -> Iterator[str]:
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def heads() -> Iterator[str]:
    for path in files():
        yield ast.get_docstring(tree_of(path)) or ""


def modules_with(pattern: re.Pattern[str], but: str) -> list[str]:
    return [
        name_of(path) for path in files() if room_of(path) not in (but, "doors") and pattern.search(path.read_text())
    ]


def homes_with_state() -> list[str]:
    return [
        name_of(path)
        for path in files()
        if HOMES_AND_BUCKETS.match(name_of(path)) and STATE_NAMES.search(path.read_text())
    ]


def dialect() -> Iterator[tuple[str, int]]:
    text = "\n".join(path.read_text() for path in files())
    for word in DIALECT:
        yield word, len(re.findall(rf"\b{word}\b", text, re.IGNORECASE))


def measured_journeys(python: str) -> dict[str, dict[str, int]]:
    """Files, functions and returns of the library's calls, from a process of its own: see tests/journeys.py."""
    done = subprocess.run(
        [python, "-m", "tests.journeys"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    counts: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return {
        f"{kind} of a journey": {name: counts[name][kind] for name in counts if kind in KINDS or name.endswith(STAGES)}
        for kind in (*KINDS, "returns")
    }


def main() -> None:
    measured = measure()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else measured
    worse = grown(measured, recorded)
    lower = {
        rule: {name: min(value, recorded[rule].get(name, value)) for name, value in sorted(values.items())}
        for rule, values in measured.items()
    }
    RECORDED.write_text(json.dumps(lower, indent=1) + "\n")
    print("\n".join(["grown, and not recorded:", *worse] if worse else ["recorded"]))


if __name__ == "__main__":
    main()
