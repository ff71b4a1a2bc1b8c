"""`python -m thinwire.deepspeed script.py arguments`, or `-m module arguments`: run what cannot be edited. Every
`import deepspeed` in it finds thinwire's, in the processes that it starts too."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from thinwire.deepspeed.module_tree import stand_in

_USAGE = f"usage: python -m thinwire.deepspeed [-h] script.py|-m module [argument ...]\n\n{__doc__}"
_FIRST = str(Path(__file__).with_name("stand_in"))


def main(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, as Python runs it."""
    is_module = arguments[:1] == ["-m"]
    rest = arguments[is_module:]
    if not rest or rest[0].startswith("-"):
        sys.exit(print(_USAGE) if rest[:1] in (["-h"], ["--help"]) else _USAGE)
    if not is_module and not Path(rest[0]).exists():
        sys.exit(f"python -m thinwire.deepspeed: there is no file {rest[0]!r}")
    sys.argv = rest
    if not is_module and not sys.flags.safe_path:
        sys.path[0] = str(Path(rest[0]).resolve().parent)
    # Processes that are started inherit the one or the other; this one finds the name whatever is in front.
    sys.path.insert(0, _FIRST)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_FIRST, os.environ.get("PYTHONPATH"))))
    stand_in()
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
