"""Floor 7, DeepSpeed's names over thinwire's: `import thinwire.deepspeed as deepspeed`, and the rest of a script stays.
Where DeepSpeed has `deepspeed.x.y.Name`, this room has `thinwire.deepspeed.x.y.Name`.

What thinwire has no counterpart of can be imported, and raises NotOfferedError, which says what to do, when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.deepspeed.lazy_names import lazy_names
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

# DeepSpeed has it in three numbers too, and what it was built from.
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split(".")[:3])
__git_hash__ = __git_branch__ = None

if TYPE_CHECKING:
    from thinwire.deepspeed.accelerator import get_accelerator
    from thinwire.deepspeed.comm import init_distributed
    from thinwire.deepspeed.initialization import add_config_arguments, initialize
    from thinwire.deepspeed.lazy_names import NotOfferedError
    from thinwire.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from thinwire.deepspeed.runtime.engine import DeepSpeedEngine
    from thinwire.deepspeed.runtime.lr_schedules import add_tuning_arguments
    from thinwire.deepspeed.utils.init_on_device import OnDevice
    from thinwire.deepspeed.utils.logging import log_dist
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        (
            "accelerator",
            "checkpoint",
            "comm",
            "git_version_info",
            "moe",
            "monitor",
            "ops",
            "pipe",
            "profiling",
            "runtime",
            "utils",
        ),
        {
            "initialization": ("add_config_arguments", "init_inference", "initialize"),
            "comm": ("init_distributed",),
            "lazy_names": ("NotOfferedError",),
            "accelerator": ("get_accelerator",),
            "pipe": ("PipelineModule",),
            "runtime": ("zero",),
            "runtime.activation_checkpointing": ("checkpointing",),
            "runtime.config": ("DeepSpeedConfig", "DeepSpeedConfigError"),
            "runtime.engine": ("DeepSpeedEngine",),
            "runtime.lr_schedules": ("add_tuning_arguments",),
            "utils.init_on_device": ("OnDevice",),
            "utils.logging": ("log_dist", "logger"),
        },
    )
