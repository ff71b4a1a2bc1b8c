"""Record what every form gives, or check that it still gives that.

python -m tests.optim.recorded.record            writes bits.json: the bits of the present commit
python -m tests.optim.recorded.record --check    replays all forms, and ends with 1 where one differs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import thinwire
from tests.optim.recorded.forms import FORMS, Form
from tests.optim.recorded.training import Outcome, run

__all__ = ["BITS", "as_json", "differences", "environment"]

BITS = Path(__file__).with_name("bits.json")


def environment() -> dict[str, str]:
    """What else may decide a bit."""
    import numba

    versions = {"torch": torch.__version__, "numba": numba.__version__}
    return {"cpu_capability": torch.backends.cpu.get_cpu_capability(), **versions}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """As bits.json has it: the digests of the weights after steps 50, 100, 150 and 200 in one string."""
    return {
        "weights": " ".join(outcome.weights.values()),
        "losses": outcome.losses,
        "bytes_sent": outcome.bytes_sent,
        "frozen_at": outcome.frozen_at,
    }


def differences(recorded: dict[str, Any], replayed: dict[str, Any]) -> list[str]:
    """What of a form is not as recorded, in words."""
    return [f"{key} {recorded[key]}, now {replayed[key]}" for key in recorded if recorded[key] != replayed[key]]


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="replay and compare")
    parser.add_argument("--file", type=Path, default=BITS, help="bits.json elsewhere")
    parser.add_argument("--only", default="", help="forms whose name contains this")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    forms = [form for form in FORMS if options.only in form.name]
    started = time.perf_counter()
    if options.check:
        recorded = json.loads(options.file.read_text())
        failed = sum(not _check(form, recorded["forms"]) for form in forms)
        print(f"{len(forms)} forms in {time.perf_counter() - started:.0f} s, {failed} differ")
        return int(failed > 0)
    _write(options.file, forms)
    print(f"{len(forms)} forms in {time.perf_counter() - started:.0f} s: {options.file}")
    return 0


def _check(form: Form, recorded: dict[str, Any]) -> bool:
    found = differences(recorded[form.name], as_json(run(form)))
    if found:
        print(f"{form.name}: {'; '.join(found)}", flush=True)
    return not found


def _write(file: Path, forms: Iterable[Form]) -> None:
    lines = [f'  "{form.name}": {json.dumps(as_json(run(form)))}' for form in forms]
    head = json.dumps({"commit": _commit(), **environment()}, indent=1)
    file.write_text(f'{head[:-2]},\n "forms": {{\n' + ",\n".join(lines) + "\n }\n}\n")


def _commit() -> str:
    """The commit of the library, with a + where its files have changed since."""
    folder = Path(thinwire.__file__).parent
    commands = (["git", "rev-parse", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no", "."])
    commit, changed = (
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
        for command in commands
    )
    return f"{commit}+" if changed else commit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
