"""Record what every form gives, or check that it still gives that.

python -m tests.optim.recorded.record --check             replay all forms; ends with 1 where one differs
python -m tests.optim.recorded.record --accept "REASON"   note what differs as meant, and why, beside what was before
python -m tests.optim.recorded.record                     write bits.json anew, from the present commit

--only TEXT takes the forms whose name contains TEXT. Forms that are new are recorded with it into a bits.json of the
same commit and machine.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numba
import torch

import thinwire
from tests.optim.recorded.forms import FORMS, Form
from tests.optim.recorded.training import Outcome, run

__all__ = ["BITS", "as_json", "differences", "environment", "expected"]

BITS = Path(__file__).with_name("bits.json")


def environment() -> dict[str, str]:
    """What else may decide a bit."""
    capability = torch.backends.cpu.get_cpu_capability()
    return {"cpu_capability": capability, "torch": torch.__version__, "numba": numba.__version__}


def as_json(outcome: Outcome) -> dict[str, Any]:
    """As bits.json has it: the digests of the weights after steps 50, 100, 150 and 200 in one string."""
    return {
        "weights": " ".join(outcome.weights.values()),
        "losses": outcome.losses,
        "bytes_sent": outcome.bytes_sent,
        "frozen_at": outcome.frozen_at,
    }


def expected(recorded: dict[str, Any], name: str) -> dict[str, Any]:
    """What the form of this name must give: what it gave, unless it was changed on purpose."""
    changed = recorded["changed"].get(name, recorded["forms"][name])
    return {key: value for key, value in changed.items() if key != "because"}


def differences(wanted: dict[str, Any], given: dict[str, Any]) -> list[str]:
    """What of a form is not as recorded, in words."""
    return [f"{key} {wanted[key]}, now {given[key]}" for key in wanted if wanted[key] != given[key]]


def main(arguments: list[str]) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="replay and compare")
    parser.add_argument("--accept", metavar="REASON", help="replay, and note what differs as meant")
    parser.add_argument("--only", metavar="TEXT", default="", help="forms whose name contains this")
    parser.add_argument("--file", type=Path, default=BITS, help="a bits.json elsewhere")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    forms = [form for form in FORMS if options.only in form.name]
    started = time.perf_counter()
    if options.check or options.accept:
        recorded = json.loads(options.file.read_text())
        differ = _compare(forms, recorded)
        if options.accept:
            recorded["changed"] |= {name: {"because": options.accept, **given} for name, given in differ.items()}
            _write(options.file, recorded)
        print(f"{len(forms)} forms in {time.perf_counter() - started:.0f} s, {len(differ)} differ")
        return int(bool(differ) and not options.accept)
    recorded = _begun(options.file, options.only)
    recorded["forms"] |= {form.name: as_json(run(form)) for form in forms}
    _write(options.file, recorded)
    print(f"{len(forms)} forms in {time.perf_counter() - started:.0f} s")
    return 0


def _compare(forms: Sequence[Form], recorded: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What those forms give that do not give what they should; said at once."""
    differ = {}
    for form in forms:
        given = as_json(run(form))
        found = differences(expected(recorded, form.name), given)
        if found:
            print(f"{form.name}: {'; '.join(found)}", flush=True)
            differ[form.name] = given
    return differ


def _begun(file: Path, only: str) -> dict[str, Any]:
    """What is recorded already and stays."""
    origin = {"commit": _commit(), **environment()}
    if not only or not file.exists():
        return origin | {"forms": {}, "changed": {}}
    recorded: dict[str, Any] = json.loads(file.read_text())
    other = differences(recorded, recorded | origin)
    if other:
        raise SystemExit(f"{file} was recorded elsewhere: {'; '.join(other)}. Record all forms, without --only")
    return recorded


def _write(file: Path, recorded: dict[str, Any]) -> None:
    """A form a line, in the order of FORMS."""
    place = {form.name: number for number, form in enumerate(FORMS)}
    lines = [f'"{key}": {json.dumps(recorded[key])}' for key in ("commit", *environment())]
    for part in ("forms", "changed"):
        inside = sorted(recorded[part].items(), key=lambda item: place[item[0]])
        body = ",".join(f'\n  "{name}": {json.dumps(outcome)}' for name, outcome in inside)
        lines.append(f'"{part}": {{{body}\n }}')
    file.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


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
