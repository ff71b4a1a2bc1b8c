"""A model in stages: each is the model's own module tree, with the same parameters under the same names, without the
blocks of other stages, and with what comes before the first block or after the last one left out where it is not due.
So the forward of a Hugging Face model goes on doing what it did, masks and losses included."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

Split = Literal["parameters", "time"] | Sequence[str]
ScheduleName = Literal[
    "1F1B",
    "Eager1F1B",
    "GPipe",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
SCHEDULES: dict[str, ScheduleName] = {name.lower(): name for name in get_args(ScheduleName)}


class _Passed(nn.Module):
    """In the place of a module that another stage has: gives back what came in."""

    def forward(self, *given: Any, **options: Any) -> Any:
        return options["inputs_embeds"] if "inputs_embeds" in options else given[0]


class _Nothing(nn.Module):
    """In the place of an embedding that the first stage has added."""

    def forward(self, index: Tensor, *given: Any, **options: Any) -> Tensor:
        return torch.zeros((), device=index.device)


class HuggingFaceStage(nn.Module):
    """A stage of a Hugging Face model: takes `input_ids`, or what the stage before gives, and the batch's other entries
    by name; gives hidden states, or the last one the loss, if there are labels."""

    def __init__(self, model: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        self.model, self.first, self.last = model, first, last

    def forward(self, given: Tensor, **batch: Any) -> Tensor:
        """Run the blocks of this stage."""
        batch["input_ids" if self.first else "inputs_embeds"] = given
        if not self.last:
            batch.pop("labels", None)
        output: Tensor = _own(self.model(**batch, return_dict=False)[0])
        return output


def _own(output: Any) -> Any:
    """A stage's output as no view: zero-bubble schedules detach it in place."""
    if isinstance(output, tuple | list):
        return type(output)(map(_own, output))
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


class StageModules(nn.ModuleDict):
    """The stages of a `whole` model that are here, by number; modules, parameters and buffers have the names it has."""

    def __init__(self, parts: Mapping[str, nn.Module], whole: nn.Module) -> None:
        super().__init__(parts)
        self._names = {id(one): name for name, one in whole.named_parameters()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Go through the parameters that are here, each under the first name that the model has for it."""
        for name, one in super().named_parameters(prefix, recurse, remove_duplicate):
            yield prefix + self._names.get(id(one), name), one

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Go through the modules that are here."""
        for part in self._wholes():
            yield from part.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """What there is here of the whole model's."""
        parts = (part.state_dict(prefix=prefix, keep_vars=keep_vars) for part in self._wholes())
        return {name: one for part in parts for name, one in part.items()}

    def forward(self, *given: Any, **options: Any) -> Any:
        """Raise RuntimeError: a schedule runs them."""
        raise RuntimeError(
            "this rank holds stages of the model only, which a schedule runs: call train_batch or eval_batch with an "
            "iterator of micro-batches"
        )

    def _wholes(self) -> Iterator[nn.Module]:
        for part in self.values():
            yield part.model if isinstance(part, HuggingFaceStage) else part


def split_model(model: nn.Module, stages: int, split: Split) -> list[nn.Module]:
    """The modules of `stages` stages, which share the parameters of `model`, each under its name there.

    A Hugging Face model is cut between its blocks, an nn.Sequential between its modules, into stages whose largest has
    as few parameters, or operations (`time`), as can be, or where `split` names what stages but the first begin with.

    Stages of a model with values are run once, and must do what it does.

    Raises ValueError for what cannot be split.
    """
    path = _blocks(model)
    at = model.get_submodule(path)
    names, prefix = [*at._modules], f"{path}." if path else ""
    if any(isinstance(one, nn.modules.batchnorm._BatchNorm) and one.track_running_stats for one in model.modules()):
        raise ValueError(
            "the model has a BatchNorm with running statistics, which micro-batches and the run by which torch finds "
            "shapes would both change: use GroupNorm or LayerNorm, or track_running_stats=False"
        )
    if stages > len(names):
        where = f" in {path}" if path else ""
        raise ValueError(f"{type(model).__name__} has {len(names)} blocks{where}, too few for {stages} stages")
    if split == "parameters":
        cuts = _balanced([_numel(block) for block in at.children()], *_ends(model, path), stages)
    elif split == "time":
        cuts = _balanced(*_operations(model, path, names), stages)
    elif isinstance(split, str) or not isinstance(split, Sequence):
        raise ValueError(f'split is "parameters", "time" or a list of blocks by name, not {split!r}')
    else:
        known = {prefix + name: number for number, name in enumerate(names)}
        if strange := [name for name in split if name not in known]:
            raise ValueError(f"no stage can begin with {strange[0]!r}: blocks are {', '.join(known)}")
        cuts = [known[name] for name in split]
        if len(cuts) != stages - 1 or sorted({*cuts} - {0}) != cuts:
            raise ValueError(
                f"split must name the first blocks of the other {stages - 1} of {stages} stages, in order, not "
                f"{list(split)}"
            )
    parts = [
        _stage(model, path, names[begin:end], number == 0, number == stages - 1)
        for number, (begin, end) in enumerate(itertools.pairwise([0, *cuts, len(names)]))
    ]
    for number, part in enumerate(parts):
        if not any(True for _ in part.parameters()):
            raise ValueError(f"stage {number} of {stages} has no parameters: give it other blocks by split=[names]")
    if not isinstance(model, nn.Sequential) and not any(one.is_meta for one in model.parameters()):
        _check(model, parts)
    return parts


def _blocks(model: nn.Module) -> str:
    """Where the list of the model's blocks lies; empty for an nn.Sequential."""
    if isinstance(model, nn.Sequential):
        return ""
    lists = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    if not lists or "inputs_embeds" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} cannot be split: a Hugging Face encoder or decoder (a list of blocks, and a "
            "forward that takes inputs_embeds) or an nn.Sequential can. Build torch's stages by hand for others"
        )
    path: str = max(lists, key=lambda found: _numel(found[1]))[0]
    return path


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _beside(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, bool]]:
    """Modules that are not on the way to the blocks: their parent, their name there, and if they come before."""
    for part in path.split(".") if path else ():
        before = True
        for name, _ in list(model.named_children()):
            if name == part:
                before = False
            else:
                yield model, name, before
        model = model.get_submodule(part)


def _ends(model: nn.Module, path: str) -> tuple[int, int]:
    """Parameters before and after the blocks."""
    found = [0, 0]
    for parent, name, before in _beside(model, path):
        found[not before] += _numel(parent.get_submodule(name))
    return found[0], found[1]


@torch.no_grad()
def _operations(model: nn.Module, path: str, names: Sequence[str]) -> tuple[list[int], int, int]:
    """Of a forward of a few tokens: of each block, before the blocks, where there are none, and after them."""
    if isinstance(model, nn.Sequential):
        raise ValueError(
            'split="time" runs the model, and the input of an nn.Sequential is not known: use "parameters", or names'
        )
    # Here, as whoever reads a configuration imports this module and would wait for it.
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.arange(8, device=next(model.parameters()).device).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens)
    counts = {name.partition(".")[2]: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    blocks = [counts.get(f"{path}.{name}", 0) for name in names]
    return blocks, 0, counter.get_total_flops() - sum(blocks)


def _balanced(sizes: list[int], before: int, after: int, stages: int) -> list[int]:
    """The numbers of the blocks that stages but the first begin with: of equal cuts the first, past blocks of no size,
    as what a stage receives may not be changed in place, by a ReLU say."""
    sizes = [sizes[0] + before, *sizes[1:]]
    sizes[-1] += after
    total = [0, *itertools.accumulate(sizes)]
    # best[end]: the largest stage, and the cuts, of the first blocks in so many stages as were looked at.
    best = {end: (total[end], [0]) for end in range(1, len(total))}
    for stage in range(1, stages):
        best = {
            end: min((max(best[cut][0], total[end] - total[cut]), [*best[cut][1], cut]) for cut in range(stage, end))
            for end in range(stage + 1, len(total))
        }
    return [next((one for one in range(cut, len(sizes)) if sizes[one]), cut) for cut in best[len(sizes)][1][1:]]


def _stage(model: nn.Module, path: str, kept: Sequence[str], first: bool, last: bool) -> nn.Module:
    part: nn.Module = copy.deepcopy(model, {id(one): one for one in model.parameters()})
    blocks = part.get_submodule(path)
    for name in [*blocks._modules]:
        if name not in kept:
            del blocks._modules[name]
    if isinstance(model, nn.Sequential):
        part.register_forward_hook(lambda _module, _given, output: _own(output))
        return part
    for parent, name, before in _beside(part, path):
        module = parent.get_submodule(name)
        if before and not first:
            setattr(parent, name, _Nothing() if isinstance(module, nn.Embedding) else _Passed())
        elif not before and not last and (_numel(module) or isinstance(module, nn.Dropout)):
            setattr(parent, name, _Passed())
    part.config.use_cache = False  # type: ignore[union-attr]
    return HuggingFaceStage(part, first, last)


@torch.no_grad()
def _check(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Raise ValueError unless the stages, one after the other, do to a few tokens what the model does."""
    modes = [(module, module.training) for whole in (model, *parts) for module in whole.modules()]
    tokens = torch.arange(8, device=next(model.parameters()).device).unsqueeze(0)
    mask = (tokens != 7).long()
    try:
        hidden = tokens
        for part in parts:
            hidden = part.eval()(hidden, attention_mask=mask)
        expected = model.eval()(input_ids=tokens, attention_mask=mask, return_dict=False)[0]
        alike = torch.equal(hidden, expected)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be split: its stages do not run ({error})") from error
    finally:
        for module, training in modes:
            module.training = training
    if not alike:
        raise ValueError(f"{type(model).__name__} cannot be split: its stages do not compute what it does")
