"""Found by `import deepspeed` where this folder is first in `sys.path`, as in all that `python -m thinwire.deepspeed`
starts: from then on the name, and every module below it, is this package's."""

from thinwire.deepspeed.module_tree import stand_in

stand_in()
