"""`init_inference` over `thinwire.inference.prepare`: a model that answers, by DeepSpeed's call and options."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor, nn
from typing_extensions import override

from thinwire.deepspeed.devices import get_accelerator
from thinwire.deepspeed.errors import DeepSpeedUsageError, NotOfferedError
from thinwire.deepspeed.ranks import init_distributed
from thinwire.engine.config.loading import read_json_object
from thinwire.inference.preparation import Quantize, prepare_itself

_DTYPES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.float32: ("fp32", "float32", "float"),
    torch.bfloat16: ("bf16", "bfloat16", "bfloat"),
    torch.int8: ("int8",),
}

_INSTEAD = {
    "base_dir": "load the weights into the model before the call",
    "checkpoint": "load the weights into the model before the call",
    "checkpoint_config": "load the weights into the model before the call",
    "ep_size": "there is no expert parallelism",
    "moe": "there is no expert parallelism",
    "mpu": "tensor_parallel={'tp_size': N} shares the model among so many ranks in a row",
    "quant": "dtype=torch.int8 has linear layers in 8 bits",
    "save_mp_checkpoint_path": "save the model that was given, by save_pretrained or torch.save",
    "set_empty_params": "give a model that has its values",
    "training_mp_size": "give the whole model",
    "zero": "tensor_parallel={'tp_size': N} shares the model among ranks",
}


def _either(name: str, other: str, default: Any) -> Any:
    return Field(default, validation_alias=AliasChoices(name, other))


class DeepSpeedTPConfig(BaseModel):
    """How many ranks in a row share a model."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    enabled: bool = True
    tp_size: int = Field(1, ge=1)
    tp_grain_size: int = 64
    mpu: None = None
    tp_group: None = None


class DeepSpeedInferenceConfig(BaseModel):
    """The options of `init_inference`, checked, by DeepSpeed's names and defaults.

    `dtype`, of weights: torch.int8 means linear layers in 8 bits, inputs too. Kernels, graphs and injection policies
    are accepted and change nothing: the model is prepared as `thinwire.inference.prepare` does. What could not be
    followed is a NotOfferedError, unless it has the value that DeepSpeed gives it.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    dtype: torch.dtype = torch.float16
    tensor_parallel: DeepSpeedTPConfig = _either("tensor_parallel", "tp", DeepSpeedTPConfig(tp_size=1))
    mp_size: int = Field(1, ge=1)
    max_out_tokens: int = _either("max_out_tokens", "max_tokens", 1024)
    keep_module_on_host: bool = False
    replace_with_kernel_inject: bool = _either("replace_with_kernel_inject", "kernel_inject", False)
    injection_policy: dict[Any, Any] | None = _either("injection_policy", "injection_dict", None)
    injection_policy_tuple: tuple[Any, ...] | None = None
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    triangular_masking: bool = _either("triangular_masking", "tm", True)
    return_tuple: bool = True
    replace_method: str = "auto"
    min_out_tokens: int = _either("min_out_tokens", "min_tokens", 1)
    transposed_mode: bool = False
    config: dict[str, Any] | None = _either("config", "args", None)

    @field_validator("dtype", mode="before")
    @classmethod
    def _read_dtype(cls, value: Any) -> Any:
        named = {name: dtype for dtype, names in _DTYPES.items() for name in (str(dtype), *names)}
        found = named.get(value, value) if isinstance(value, str) else value
        if found not in _DTYPES:
            raise ValueError(f"expected one of {', '.join(map(str, _DTYPES))}, or its name")
        return found

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, instead in _INSTEAD.items():
            if given.get(name) not in (None, False, "", 1, {}, {"enabled": False}):
                raise NotOfferedError(f"init_inference takes no {name}, got {given[name]!r}: {instead}")
        return {name: one for name, one in given.items() if name not in _INSTEAD}

    @model_validator(mode="after")
    def _by_either_name(self) -> DeepSpeedInferenceConfig:
        if self.mp_size > self.tensor_parallel.tp_size:
            self.tensor_parallel = self.tensor_parallel.model_copy(update={"tp_size": self.mp_size})
        return self

    @property
    def ranks(self) -> int:
        """That share the model."""
        size = self.tensor_parallel.tp_size if self.tensor_parallel.enabled else 1
        return max(size, self.mp_size)


class InferenceEngine(nn.Module):
    """A model that answers; `module` is it, and has what the engine itself does not."""

    def __init__(self, model: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if config.ranks > 1:
            init_distributed()
        if not config.keep_module_on_host:
            model.to(get_accelerator().current_device_name())
        in_8_bits = config.dtype == torch.int8
        quantize: Quantize | None = "int8-dynamic" if in_8_bits else None
        dtype = torch.float32 if in_8_bits else config.dtype
        self._config = config
        self._prepared = prepare_itself(lambda: model, dtype, quantize, config.ranks, compile=False)
        self.module = self._prepared.model
        self.mp_world_size = config.ranks
        self.model_profile_enabled = False
        self._times: list[float] = []

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        begin = self._now()
        found = self._prepared(*inputs, **kwargs)
        if self.model_profile_enabled:
            self._times.append(self._now() - begin)
        return found

    def generate(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Tokens, by the `generate` of a Hugging Face decoder.

        Raises RuntimeError for a prompt of more than `max_out_tokens`.
        """
        tokens = inputs[0] if inputs else kwargs.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.shape[-1] > self._config.max_out_tokens:
            raise RuntimeError(
                f"the prompt has {tokens.shape[-1]} tokens, and max_out_tokens is {self._config.max_out_tokens}: give "
                "init_inference as many as prompt and answer have"
            )
        return self._prepared.generate(*inputs, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time calls from now on, for `model_times`."""
        self.model_profile_enabled = True

    def model_times(self) -> list[float]:
        """Milliseconds of the calls since this was called last. Raises AssertionError without profile_model_time."""
        assert self.model_profile_enabled, "call profile_model_time() before the calls that it shall time"
        found, self._times = self._times, []
        return found

    def _now(self) -> float:
        if self.model_profile_enabled:
            get_accelerator().synchronize()
        return 1e3 * time.perf_counter()

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(
    model: nn.Module, config: str | Path | Mapping[str, Any] | None = None, **kwargs: Any
) -> InferenceEngine:
    """`deepspeed.init_inference`: have a model answer, in another dtype or 8 bits, and shared among ranks; the model
    itself, no copy.

    `config`: a JSON file, or a dict, of the options that DeepSpeedInferenceConfig lists; `kwargs` are options too.
    Collective where ranks share the model. Raises ValueError for an option that neither has or that both give
    differently, for no module, and for `keep_module_on_host` alone, as in DeepSpeed; NotOfferedError for one that
    cannot be followed, and what `thinwire.inference.prepare` raises.
    """
    if not isinstance(model, nn.Module):
        raise DeepSpeedUsageError(f"init_inference takes a torch.nn.Module, got {type(model).__name__}")
    given = dict(config) if isinstance(config, Mapping) else {} if config is None else read_json_object(Path(config))
    for name in sorted(given.keys() & kwargs.keys()):
        if given[name] != kwargs[name]:
            raise ValueError(
                f"Conflicting argument {name!r}: {given[name]!r} in config, {kwargs[name]!r} beside it; give it once"
            )
    settings = DeepSpeedInferenceConfig(**{**given, **kwargs})
    _validate_keep_module_on_host(settings)
    return InferenceEngine(model, settings)


def _validate_keep_module_on_host(config: DeepSpeedInferenceConfig) -> None:
    """Raise DeepSpeedUsageError, a ValueError, where DeepSpeed would have moved the model all the same."""
    changes = config.injection_policy or config.replace_with_kernel_inject or config.ranks > 1
    if config.keep_module_on_host and not changes:
        raise DeepSpeedUsageError(
            "keep_module_on_host requires an injection policy, kernel injection, or AutoTP: give "
            "replace_with_kernel_inject=True, which changes nothing else here, or leave it out"
        )
