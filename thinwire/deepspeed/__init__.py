"""Floor 7, DeepSpeed's names over thinwire's: `import thinwire.deepspeed as deepspeed`, and the rest of a script stays.
Where DeepSpeed has `deepspeed.x.y.Name`, this room has `thinwire.deepspeed.x.y.Name`.

What thinwire has no counterpart of can be imported, and raises NotOfferedError, which says what to do, when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.deepspeed.module_tree import ENTRY, find_name, install, list_names
from thinwire.version import __version__

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "NotOfferedError",
    "OnDevice",
    "add_config_arguments",
    "add_tuning_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
]

if TYPE_CHECKING:
    from thinwire.deepspeed.devices import get_accelerator
    from thinwire.deepspeed.engine import DeepSpeedEngine
    from thinwire.deepspeed.errors import NotOfferedError
    from thinwire.deepspeed.initialization import add_config_arguments
    from thinwire.deepspeed.initialization import initialize_as_deepspeed as initialize
    from thinwire.deepspeed.ranks import init_distributed
    from thinwire.deepspeed.schedules import add_tuning_arguments
    from thinwire.deepspeed.sections import DeepSpeedConfig
    from thinwire.deepspeed.utilities import OnDevice, log_dist
    from thinwire.engine import ConfigError as DeepSpeedConfigError

# DeepSpeed has it in three numbers too, and what it was built from.
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split(".")[:3])
__git_hash__ = __git_branch__ = None

install()
__path__ = [*__path__, ENTRY]


def __getattr__(name: str) -> Any:
    return find_name("", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *list_names("")})
