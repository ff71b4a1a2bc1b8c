"""Activation checkpointing call by call, as `deepspeed.checkpointing` has it: a function runs, only its inputs are
kept, and it runs again in backward.

The settings and the generators' states belong to the process, as they do there: calls deep inside a model have nothing
else to find them by. `thinwire.initialize` needs none of this: its configuration names modules to recompute.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.activation_checkpointing import recomputed_call
from thinwire.engine.config.loading import read_json_object

_MODEL_PARALLEL = "model-parallel-rng"
_SECTION = "activation_checkpointing"
# What the section of a configuration calls what configure() takes.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


class RandomStates:
    """States of the generator that dropout draws from, the current GPU's or the CPU's, by name.

    What is drawn inside `fork(name)` comes from that state, and goes on there at the next fork; the generator itself
    stays where it was. `checkpoint` gives its second run the states of its first.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """The states by name, in a dict of your own."""
        return copy.copy(self._states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Go on from what `get_states` returned."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state with `seed`. Raises ValueError for a name or a seed that is there already."""
        if name in self._states or seed in self._seeds:
            taken = f"state {name!r}" if name in self._states else f"seed {seed}"
            raise ValueError(f"{taken} was added already: two states alike would draw the same numbers; call reset()")
        self._seeds.add(seed)
        before = _random().get_rng_state()
        _random().manual_seed(seed)
        self._states[name] = _random().get_rng_state()
        _random().set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the state `name`. Raises KeyError for one that was not added."""
        if name not in self._states:
            raise KeyError(f"no state {name!r}: call model_parallel_cuda_manual_seed(seed), or add({name!r}, seed)")
        before = _random().get_rng_state()
        _random().set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _random().get_rng_state()
            _random().set_rng_state(before)


class _Process:
    """What configure() has set; `states`: those of the generators; `model_parallel_rank`: of the `mpu` given."""

    states = RandomStates()
    configured = checkpoint_in_cpu = synchronize = False
    model_parallel_rank = 0


_process = _Process()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, of which only the inputs are kept; backward runs it again.

    It returns what the function returns, whatever that is. Random numbers are the same in both runs, also those drawn
    in `get_cuda_rng_tracker().fork()`, and so is autocast. Gradients reach tensors among the arguments, and whatever
    else the function uses. With `checkpoint_in_cpu` the arguments that need gradients lie in CPU memory meanwhile.
    """
    _synchronize()
    cpu = _process.checkpoint_in_cpu and torch.is_grad_enabled()
    result = recomputed_call(function, args, kwargs, cpu_checkpointing=cpu, contexts=_contexts)
    _synchronize()
    return result


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """`checkpoint` by the call of an autograd function."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """`checkpoint(run_function, *args)`; what comes back joins `all_outputs`, one by one, too."""
        outputs = checkpoint(run_function, *args)
        all_outputs += outputs if isinstance(outputs, tuple | list) else [outputs]
        return outputs


def configure(
    mpu_: Any = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose what `checkpoint` does from now on in this process; what is not given is off.

    Args:
        mpu_: what knows the ranks of a model-parallel group, which must be of one rank, or None.
        deepspeed_config: a configuration, or the path of one, whose section "activation_checkpointing" is used where an
            argument is None.
        checkpoint_in_cpu: keep the arguments that need gradients in CPU memory.
        synchronize: wait for the GPU before and after each call.
        partition_activations: changes nothing: one rank holds a whole activation.
        contiguous_checkpointing: changes nothing: torch's allocator places activations.
        num_checkpoints: changes nothing, it goes with the former.
        profile: changes nothing: torch.profiler times checkpoints too.

    A warning lists what was given and changes nothing, no result either.

    Raises ValueError for a model-parallel group of several ranks, or another value than true or false.
    """
    arguments = dict(locals())
    given = _section(deepspeed_config)
    given |= {name: arguments[name] for name in _KEYS.values() if arguments[name] is not None}
    for name, value in given.items():
        if name != "num_checkpoints" and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}, expected true or false")
    rank = _model_parallel_rank(mpu_)
    idle = [name for name in given if given[name] and name not in ("checkpoint_in_cpu", "synchronize")]
    if idle:
        warnings.warn(
            f"{', '.join(idle)}: accepted, and without effect: no tensor parallelism divides activations here, "
            "torch's allocator places them, and torch.profiler times them",
            RuntimeWarning,
            stacklevel=2,
        )
    _process.checkpoint_in_cpu = bool(given.get("checkpoint_in_cpu"))
    _process.synchronize = bool(given.get("synchronize"))
    _process.model_parallel_rank = rank
    _process.configured = True


def is_configured() -> bool:
    """Whether `configure` has been called; `checkpoint` works without."""
    return _process.configured


def reset() -> None:
    """Let go of buffers between forwards that no backward follows. There are none: what a checkpoint keeps goes with
    its graph."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Accept DeepSpeed's call: one rank holds a whole activation either way."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generator with `seed`, and begin the state that `get_cuda_rng_tracker().fork()` draws from with one that
    differs between the ranks of a model-parallel group."""
    _process.states.reset()
    _random().manual_seed(seed)
    _process.states.add(_MODEL_PARALLEL, seed + 2718 + _process.model_parallel_rank)


def get_cuda_rng_tracker() -> RandomStates:
    """The states of this process."""
    return _process.states


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the first run and the second, which draws from the named states as they were before the first."""
    return nullcontext(), _with_states(_process.states.get_states())


@contextmanager
def _with_states(states: Mapping[str, Tensor]) -> Iterator[None]:
    before = _process.states.get_states()
    _process.states.set_states(states)
    try:
        yield
    finally:
        _process.states.set_states(before)


def _section(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if config is None:
        return {}
    tree = config if isinstance(config, Mapping) else read_json_object(Path(config))
    section = tree.get(_SECTION) or {}
    return {ours: section[theirs] for theirs, ours in _KEYS.items() if section.get(theirs) is not None}


def _model_parallel_rank(mpu: Any) -> int:
    if mpu is None:
        return 0
    prefix = "get_tensor_model_parallel" if hasattr(mpu, "get_tensor_model_parallel_rank") else "get_model_parallel"
    size = getattr(mpu, f"{prefix}_world_size")()
    if size > 1:
        raise ValueError(
            f"mpu has model-parallel groups of {size} ranks, and thinwire has no model parallelism: give one whose "
            "groups are of 1 rank, or None"
        )
    return int(getattr(mpu, f"{prefix}_rank")())


def _synchronize() -> None:
    if _process.synchronize and torch.cuda.is_available():
        torch.cuda.synchronize()


def _random() -> Any:
    """The module of the generator that dropout draws from: torch.cuda for the current GPU's, or torch."""
    return torch.cuda if torch.cuda.is_available() else torch
