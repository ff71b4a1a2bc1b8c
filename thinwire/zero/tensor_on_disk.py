"""Tensors whose values rest in files of a disk, and are in memory while something computes with them: the sharded
parameters of a model that no memory holds, and their gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.zero.disk import Buffer, Disk, SwapFile
from thinwire.zero.saved_state import SavedSlice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PIECE_NUMEL = 1 << 20
"""Of a file of values: read at a disk's full rate, and small beside any layer that needs a disk."""

_FEWEST_NUMEL = 1 << 14  # of a shard, below which it stays in memory
_REMEMBERED = 1 << 18  # reads of a step


class Shelf:
    """Files of parameters and gradients below a folder, of this process alone; a step's files are read ahead in the
    order in which the one before asked for them. Collective to make; raises ValueError as `Disk` does."""

    def __init__(self, path: Path, comm: Communicator, device: torch.device) -> None:
        self.disk, self.device = Disk(path, comm, "parameters"), device
        self._asked_for: deque[SwapFile] = deque(maxlen=_REMEMBERED)

    def take(self, file: SwapFile) -> Buffer:
        """A buffer with what a file has. Raises SwapFileError."""
        self._asked_for.append(file)
        return self.disk.ring.take(file)

    def end_step(self) -> None:
        """Wait until all is on the disk. Collective: raises SwapFileError on every rank."""
        self.disk.finish()
        self.disk.ring.expect(self._asked_for)
        self._asked_for.clear()


class Rest:
    """Where `numel` values of a dtype rest. `norm`: their 2-norm, noted as they are written, if `keeps_norm`. `writes`:
    how often they have changed. With `has_beside` there is room for others beside, which `keep_ahead` puts in their
    place. `gradient`: of a parameter's. `then`: called with a gradient when a backward has brought it, flat.
    """

    gradient: Rest | None = None
    then: Callable[[Tensor], None] | None = None

    def __init__(
        self,
        shelf: Shelf,
        name: str,
        numel: int,
        dtype: torch.dtype,
        keeps_norm: bool = False,
        has_beside: bool = False,
    ) -> None:
        self.shelf, self.numel, self.dtype, self.keeps_norm, self.writes = shelf, numel, dtype, keeps_norm, 0
        sizes = [min(PIECE_NUMEL, numel - start) for start in range(0, numel, PIECE_NUMEL)]
        self._files = [(shelf.disk.plan(name, size * dtype.itemsize), size) for size in sizes]
        self._beside = [shelf.disk.plan(name, size * dtype.itemsize) for size in sizes if has_beside]
        self.norm = torch.zeros(())
        self._factors: list[float] = []

    def read(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of values, [stop - start], in another dtype if it is given. Raises SwapFileError."""
        values, ring = torch.empty(stop - start, dtype=dtype or self.dtype), self.shelf.disk.ring
        parts = list(self._parts(start, stop))
        ring.expect((file for file, *_ in parts), if_idle=True)
        for file, size, inside, place in parts:
            buffer = self.shelf.take(file)
            values[place] = _as(buffer, size, self.dtype)[inside]
            ring.give_back(file, buffer, None)
        for factor in self._factors:
            values.mul_(factor)
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Replace the values from `start` on by these, [any number]. What a disk has against it `Shelf.end_step` says,
        or who reads them."""
        if values.numel() < self.numel and (self._factors or self.keeps_norm):
            given, values = values, self.read(0, self.numel)
            values[start : start + given.numel()] = given
            start = 0
        self.writes += 1
        self._factors.clear()
        if self.keeps_norm:
            self.norm = torch.linalg.vector_norm(values, dtype=torch.float32)
        for file, size, inside, place in self._parts(start, start + values.numel()):
            whole = inside.stop - inside.start == size
            buffer = self.shelf.disk.ring.blank(file) if whole else self.shelf.take(file)
            _as(buffer, size, self.dtype)[inside] = values[place]
            self.shelf.disk.ring.give_back(file, buffer, size * self.dtype.itemsize)

    def scale(self, factor: float) -> None:
        """Multiply the values, which costs nothing before they are read."""
        self.writes += 1
        self._factors.append(factor)

    @contextmanager
    def held(self, start: int, beside: bool) -> Iterator[Tensor]:
        """Have the values of the file that begins at `start` in memory inside; written afterwards, `beside` if so."""
        number = start // PIECE_NUMEL
        file, size = self._files[number]
        buffer = self.shelf.take(file)
        try:
            yield _as(buffer, size, self.dtype)
        finally:
            self.shelf.disk.ring.give_back(self._beside[number] if beside else file, buffer, size * self.dtype.itemsize)

    def keep_ahead(self, start: int) -> None:
        """Have what was written beside."""
        number = start // PIECE_NUMEL
        self.shelf.disk.ring.exchange(self._files[number][0], self._beside[number])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[SwapFile, int, slice, slice]]:
        """The files with these values: each with its size, where they are in it, and among them."""
        for number in range(start // PIECE_NUMEL, -(-stop // PIECE_NUMEL)):
            file, size = self._files[number]
            first = number * PIECE_NUMEL
            inside = slice(max(start - first, 0), min(stop - first, size))
            yield file, size, inside, slice(inside.start + first - start, inside.stop + first - start)


class TensorOnDisk(Tensor):
    """Values that rest in `rest`, from `start` on, as a tensor of `shape`, seen through `views`.

    Any operation reads what it needs, on the tensor's device, and writes back what it changes; views stay on the disk.
    FSDP2 gathers it through its extension for tensors of other kinds.
    """

    rest: Rest
    start: int
    views: tuple[Callable[[Tensor], Tensor], ...]

    @staticmethod
    def __new__(
        cls, rest: Rest, start: int, shape: Sequence[int], views: tuple[Callable[[Tensor], Tensor], ...] = ()
    ) -> TensorOnDisk:
        """Show values of a rest."""
        base = shown = torch.empty(shape, dtype=rest.dtype, device="meta")
        for view in views:
            shown = view(shown)
        made: TensorOnDisk = torch.Tensor._make_wrapper_subclass(
            cls, shown.shape, shown.stride(), shown.storage_offset(), dtype=rest.dtype, device=rest.shelf.device
        )
        made.rest, made.start, made._whole, made.views = rest, start, base.shape, views
        return made

    _whole: torch.Size
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func.is_view:
            return args[0]._seen_through(func, args[1:], given)
        named = {**dict(zip((one.name for one in func._schema.arguments), args, strict=False)), **given}
        outputs = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        changed = [one for name in outputs for one in tree_leaves(named.get(name))]
        written: list[TensorOnDisk] = list(filter(_is_on_disk, changed))
        overwritten = written[0] if func is torch.ops.aten.copy_.default and written and not written[0].views else None
        held: dict[int, tuple[Tensor, Tensor]] = {}

        def show(one: Any) -> Any:
            if isinstance(one, TensorOnDisk):
                if id(one) not in held:
                    held[id(one)] = one._held(read=one is not overwritten)
                return held[id(one)][1]
            return one

        result = func(*tree_map(show, args), **tree_map(show, given))
        for one in written:
            one.rest.write(one.start, held[id(one)][0])
        place_of = {id(held[id(one)][1]): one for one in written}
        return tree_map(lambda one: place_of.get(id(one), one), result)

    def read(self) -> Tensor:
        """A copy in CPU memory. Raises SwapFileError."""
        return self._seen(self.rest.read(self.start, self.start + self._whole.numel()))

    def _held(self, read: bool, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """All the values, flat, and what is seen of them, on the tensor's device; read in a dtype."""
        numel, device = self._whole.numel(), self.rest.shelf.device
        if read:
            flat = self.rest.read(self.start, self.start + numel, dtype).to(device)
        else:
            flat = torch.empty(numel, dtype=self.rest.dtype, device=device)
        return flat, self._seen(flat)

    def _seen(self, flat: Tensor) -> Tensor:
        shown = flat.view(self._whole)
        for view in self.views:
            shown = view(shown)
        return shown

    def _seen_through(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        def view(values: Tensor) -> Any:
            return func(values, *args, **kwargs)

        seen = view(torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta"))
        if not isinstance(seen, Tensor):
            parts = [partial(_part, view, at) for at in range(len(seen))]
            return [TensorOnDisk(self.rest, self.start, self._whole, (*self.views, part)) for part in parts]
        is_run = seen.numel() == self.numel() or func is torch.ops.aten.slice.Tensor
        if is_run and not self.views and seen.is_contiguous() and seen.dtype == self.dtype:
            # Of some rows or of all, in whatever shape: that alone is read.
            return TensorOnDisk(self.rest, self.start + int(seen.storage_offset()), seen.shape)
        return TensorOnDisk(self.rest, self.start, self._whole, (*self.views, view))

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What FSDP2 sends of this shard."""
        return (self._held(read=True, dtype=mp_policy.param_dtype)[1],), None

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[()]] | None:
        """What FSDP2 shows of what came: all of it as it is."""
        return (all_gather_outputs[0], ()) if out is None else None

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values: a file ends with its process."""
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Say where it is, without reading it."""
        return f"TensorOnDisk({tuple(self.shape)}, {self.dtype}, in {self.rest.shelf.disk.folder})"


def _is_on_disk(values: object) -> TypeGuard[TensorOnDisk]:
    return isinstance(values, TensorOnDisk)


def _part(view: Callable[[Tensor], Any], number: int, values: Tensor) -> Tensor:
    part: Tensor = view(values)[number]
    return part


def on_cpu(values: Tensor) -> Tensor:
    """The values in CPU memory: a copy where they rest elsewhere."""
    return values.read() if isinstance(values, TensorOnDisk) else values.to("cpu")


def on_gradient(parameter: Any, shown: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call with this rank's averaged gradient of a sharded parameter, flat, when a backward brought it; `shown`: its
    shard."""
    if not isinstance(shown, TensorOnDisk):
        parameter.register_post_accumulate_grad_hook(lambda one: call(one.grad.to_local().reshape(-1)))
    elif shown.rest.gradient is not None:
        shown.rest.gradient.then = call


def mark_of(values: Tensor | None) -> object:
    """Another one once the values are written."""
    if isinstance(values, TensorOnDisk):
        return values.rest, values.rest.writes
    return None if values is None else (values.data_ptr(), values._version)


def saved_slice(kind: str, name: str, start: int, values: Tensor, dtype: torch.dtype | None = None) -> SavedSlice:
    """A checkpoint's slice of these flat values, in another dtype if it is given; read when it is saved."""
    wanted = dtype or values.dtype
    if isinstance(values, TensorOnDisk):
        empty = torch.empty(values.shape, dtype=wanted, device="meta")
        return SavedSlice(kind, name, start, empty, lambda: values.read().to(wanted))
    return SavedSlice(kind, name, start, values.to(wanted))


class ParametersOnDisk:
    """Files for the parameters of a sharded model, and their gradients; made with room for all, filled by `move`.

    Shards of few elements stay in memory, as do parameters that the ranks cannot cut evenly. Collective; raises
    ValueError, on every rank, where there is no room.
    """

    def __init__(self, model: nn.Module, shelf: Shelf) -> None:
        self._model, self._left = model, dict[str, Rest]()
        for name, one in model.named_parameters():
            if not hasattr(one, "device_mesh") or one.shape[0] % one.device_mesh.size():
                continue
            if (numel := one.numel() // one.device_mesh.size()) >= _FEWEST_NUMEL:
                plan = partial(Rest, shelf, numel=numel)
                gradient = plan(f"{name}-gradient", dtype=torch.float32, keeps_norm=True)
                values = plan(name, dtype=one.dtype, has_beside=one.requires_grad)
                values.gradient = gradient if one.requires_grad else None
                self._left[name] = values
        shelf.disk.begin(keeps_half=True)

    @torch.no_grad()
    def move(self) -> None:
        """Put all parameters that have values by now into their files, and have tensors on the disk in their place."""
        moved: dict[int, nn.Parameter] = {}
        for name, one in list(self._model.named_parameters()):
            if name in self._left and not one.is_meta:
                moved[id(one)] = _moved(one, self._left.pop(name))
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in moved:
                    module._parameters[name] = moved[id(parameter)]


def _moved(parameter: Any, rest: Rest) -> nn.Parameter:
    local = parameter.to_local()
    rest.write(0, local.reshape(-1))
    local.untyped_storage().resize_(0)  # FSDP2 has another reference until it takes its shards from the parameters
    shown = nn.Parameter(_sharded(parameter, TensorOnDisk(rest, 0, local.shape)), parameter.requires_grad)
    if rest.gradient is not None:
        shown.register_post_accumulate_grad_hook(partial(_keep, rest.gradient))  # type: ignore[no-untyped-call]
    return shown


@torch.no_grad()
def _keep(rest: Rest, parameter: Any) -> None:
    """Have an averaged gradient on the disk, where another backward's is added to it."""
    gradient = parameter.grad.to_local()
    if not isinstance(gradient, TensorOnDisk):
        rest.write(0, gradient.reshape(-1))
        parameter.grad = _sharded(parameter, TensorOnDisk(rest, 0, gradient.shape))
    if rest.then is not None:
        rest.then(gradient.reshape(-1))


def _sharded(like: DTensor, local: Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor  # half a second that only stage 3 should cost

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _as(buffer: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
    return buffer.values[: numel * dtype.itemsize].view(dtype)
