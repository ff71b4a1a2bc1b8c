"""`python -m thinwire`, where the console script `thinwire` is not on the path, as under torchrun and mpirun."""

from __future__ import annotations

import sys

from thinwire.command_line import main

if __name__ == "__main__":
    sys.exit(main())
