"""A small model of numbered layers, data that differ by rank, and a training loop; DiLoCo's Algorithm 1 and Streaming
DiLoCo's Algorithm 2 in float64; what holds on every backend, for threads and for real ranks; and elastic workers, as
threads that meet at a store of their process."""

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

import thinwire
from thinwire.comm import Communicator, Elastic, communicator, elastic
from thinwire.optim import elastic_job
from thinwire.optim.diloco.elastic_home import ElasticHome
from thinwire.optim.diloco.fragments import Fragment


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All of them end to end."""
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def streaming(
    model: nn.Module,
    workers: int,
    steps: int,
    make_inner: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    fragments: Sequence[Tensor],
    *,
    every: int,
    overlap: int,
    mix: float | str,
    outer_lr: float | str,
    momentum: float,
    share: Mapping[str, int] | None = None,
    weigh: Sequence[float] | None = None,
    spoils: Mapping[tuple[int, int], float] | None = None,
    guard: float | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The outer weights, and each worker's own, flat, after `steps`; `fragments`: places in the flat weights; `share`:
    state of which workers take the mean after every so many outer steps, of a single fragment without overlap;
    `mix`: or "carry", which keeps what was done in flight; `outer_lr`: or "auto", by which
    η (1 + μ / (1 - μ rho)) (1 - mix) = 1; `weigh`: what workers do; `spoils`: by worker and step a factor of what it
    has done since; `guard`: deviations beyond which a worker is left out, and goes on from the outer weights.

    Algorithm 2; with one fragment, no overlap and mix 0, Algorithm 1. The outer optimizer is torch's own SGD.
    """
    replicas = [copy.deepcopy(model).double() for _ in range(workers)]
    inner = [make_inner(list(one.parameters())) for one in replicas]
    outer = [flat(replicas[0].parameters())[places].requires_grad_() for places in fragments]
    first = outer_lr if isinstance(outer_lr, float) else 0.0
    optimizers = [torch.optim.SGD([one], lr=first, momentum=momentum, nesterov=momentum > 0) for one in outer]
    gradients: list[list[Tensor]] = [[] for _ in fragments]
    arriving: dict[tuple[int, int], Tensor] = {}
    departed: dict[int, Tensor] = {}
    judges = [Judge(guard) for _ in fragments]
    taken = 1.0 if isinstance(mix, str) else 1 - mix
    for step in range(1, steps + 1):
        for worker, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            optimizer.zero_grad()
            loss_of(replica, worker, step).backward()
            if flat(one.grad for one in replica.parameters()).isfinite().all():
                optimizer.step()
        own = torch.stack([flat(replica.parameters()) for replica in replicas])
        for number, places in enumerate(fragments):
            if (step - -(-(number + 1) * every // len(fragments))) % every == 0:
                for worker in range(workers):
                    factor = (spoils or {}).get((worker, step), 1.0)
                    own[worker, places] = torch.lerp(outer[number].detach(), own[worker, places], factor)
                arriving[number, step + overlap] = outer[number].detach() - own[:, places]
                departed[number] = own[:, places].clone()
            if (sent := arriving.pop((number, step), None)) is not None:
                kept = judges[number].kept(sent) if guard else torch.ones(workers).double()
                if not kept.any():
                    own[:, places] = outer[number].detach()
                    judges[number].follow(sent)
                    continue
                shares = kept * torch.tensor(weigh or [1.0] * workers).double()
                gradient = (shares[:, None] * sent.where(kept[:, None] > 0, 0)).sum(0) / shares.sum()
                outer[number].grad = gradient
                if outer_lr == "auto":
                    optimizers[number].param_groups[0]["lr"] = 1 / taken / long_run(gradients[number], momentum)
                    gradients[number].append(gradient)
                optimizers[number].step()
                carried = own[:, places] - departed[number]
                own[:, places] = (1 - taken) * own[:, places] + taken * outer[number].detach()
                own[:, places] += carried if mix == "carry" else 0
                own[:, places] = own[:, places].where(kept[:, None] > 0, outer[number].detach())
                if guard:
                    judges[number].follow(sent)
        for replica, weights in zip(replicas, own, strict=True):
            torch.nn.utils.vector_to_parameters(weights, replica.parameters())
        for kind in (kind for kind, times in (share or {}).items() if step % (times * every) == 0):
            for alike in zip(*(replica.parameters() for replica in replicas), strict=True):
                states = [one.state[weight] for one, weight in zip(inner, alike, strict=True)]
                if kind in states[0]:
                    mean = torch.stack([one[kind] for one in states]).mean(0)
                    for one in states:
                        one[kind].copy_(mean)
    common = torch.empty_like(own[0])
    for weights, places in zip(outer, fragments, strict=True):
        common[places] = weights.detach()
    return common, list(own)


class Judge:
    """Says whose outer gradients of a fragment, [workers, elements], are outliers: by norms beyond so many standard
    deviations of those so far and twice their mean, of three beyond three times the middle one; by negative cosines
    with the median of directions; or as they are not finite."""

    def __init__(self, deviations: float | None) -> None:
        self.deviations = deviations or 0.0
        self.mean = self.variance = self.most = 0.0

    def kept(self, sent: Tensor) -> Tensor:
        norms = sent.norm(dim=1)
        middle = norms[norms.isfinite()].median().item() if norms.isfinite().any() else 0.0
        if not self.mean:
            self.mean, self.variance = middle, 4 * middle**2
        self.most = self.mean + max(self.deviations * self.variance**0.5, self.mean)
        self.most = min(self.most, 3 * middle) if len(sent) > 2 else self.most
        kept = norms <= self.most
        if kept.sum() > 2:
            directions = sent / norms[:, None]
            kept &= directions @ directions[kept].quantile(0.5, dim=0) >= 0
        return kept.double()

    def follow(self, sent: Tensor) -> None:
        kept, norms = self.kept(sent) > 0, sent.norm(dim=1)
        norms = norms[kept] if kept.any() else norms[norms.isfinite()].clamp(max=self.most)
        if len(norms):
            self.variance = 0.8 * self.variance + 0.2 * (norms - self.mean).square().mean().item()
            self.mean = 0.8 * self.mean + 0.2 * norms.mean().item()


def spoil(optimizer: thinwire.DiLoCo, worker: int, spoils: Mapping[tuple[int, int], float]) -> None:
    """Have a worker send so many times what it has done since the last outer step, by worker and step."""
    home = optimizer._home

    def hook(*_: Any) -> None:
        factor = spoils.get((worker, home.steps + 1))
        for fragment in home._timetable.leaving(home.steps + 1) if factor is not None else ():
            outer, own = home.weights.outer(fragment), home.weights.replica(fragment)
            home.weights.set(fragment, outer.clone(), torch.lerp(outer, own, factor))

    optimizer.inner.register_step_post_hook(hook)


def long_run(gradients: Sequence[Tensor], momentum: float) -> float:
    """How far along an outer gradient its own and the momentum's part of Nesterov's steps go, as those so far tell:
    1 + μ / (1 - μ rho), if one correlates by rho with the last."""
    velocities = list(itertools.accumulate(gradients, lambda before, one: momentum * before + one))
    before = own = 0.0
    for gradient, velocity in zip(gradients[1:], velocities, strict=False):
        before, own = 0.9 * before + float(gradient @ velocity), 0.9 * own + float(gradient @ gradient)
    rho = before / (own + momentum * before) if len(gradients) > 1 else 0.5
    return 1 + momentum / (1 - momentum * rho)


def algorithm_1(
    model: nn.Module,
    rounds: Sequence[Mapping[int, Sequence[int]]],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    *,
    every: int,
    outer_lr: float,
    momentum: float,
    share: Mapping[str, int] | None = None,
) -> Tensor:
    """The outer weights of Algorithm 1 by AdamW workers that differ from round to round, flat; `rounds`: by worker that
    is present, of whose data it averages the gradients. `share`: state of which they take the mean after so many
    rounds; who comes has the first one's state then, in which what is shared is as it was last alike."""
    model = model.double()
    outer = flat(model.parameters())
    velocity = torch.zeros_like(outer)
    workers: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}
    alike: dict[str, list[Tensor]] = {}
    begun: dict[str, Any] = {}
    for number, present in enumerate(rounds):
        for worker, data in present.items():
            if worker not in workers:
                own = copy.deepcopy(model)
                workers[worker] = own, torch.optim.AdamW(own.parameters(), lr=0.01)
                if alike:
                    workers[worker][1].load_state_dict(begun)
                    set_state(workers[worker][1], alike)
            own, inner = workers[worker]
            torch.nn.utils.vector_to_parameters(outer.clone(), own.parameters())
            for at in range(number * every, (number + 1) * every):
                inner.zero_grad()
                torch.stack([loss_of(own, one, at + 1) for one in data]).mean().backward()
                inner.step()
        inners = [workers[worker][1] for worker in present]
        for kind in (kind for kind, rounds_each in (share or {}).items() if (number + 1) % rounds_each == 0):
            states = [[entry[kind] for entry in one.state.values()] for one in inners]
            alike[kind] = [torch.stack(of_weight).mean(0) for of_weight in zip(*states, strict=True)]
            for one in inners:
                set_state(one, {kind: alike[kind]})
        begun = copy.deepcopy(inners[0].state_dict())
        gradient = torch.stack([outer - flat(workers[worker][0].parameters()) for worker in present]).mean(0)
        velocity = momentum * velocity + gradient
        outer = outer - outer_lr * (gradient + momentum * velocity)
    return outer


def set_state(inner: torch.optim.Optimizer, values: Mapping[str, Sequence[Tensor]]) -> None:
    """By kind, of each weight."""
    for kind, of_weights in values.items():
        for entry, value in zip(inner.state.values(), of_weights, strict=True):
            entry[kind].copy_(value)


class Tower(nn.Module):
    """Four numbered layers between what lies in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.last = nn.Linear(7, 1)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden.tanh())
        return self.last(hidden)


NUMEL = sum(parameter.numel() for parameter in Tower().parameters())


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 5, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()


def make(comm: Communicator, model: nn.Module, inner: Any = torch.optim.SGD, **options: Any) -> thinwire.DiLoCo:
    options = {"lr": 0.05, "every": 4, "codec": "none", "block_size": 64} | options
    return thinwire.DiLoCo(model.named_parameters(), inner, comm=comm, **options)


def train(model: nn.Module, optimizer: thinwire.DiLoCo, first: int, last: int) -> None:
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss_of(model, optimizer.comm.rank, step).backward()
        optimizer.step()


def trained(comm: Communicator, steps: int, inner: Any = torch.optim.SGD, **options: Any) -> tuple[Tower, Any]:
    """The model and its optimizer after so many steps."""
    model = Tower()
    optimizer = make(comm, model, inner, **options)
    train(model, optimizer, 1, steps)
    return model, optimizer


def outer_weights(model: nn.Module, optimizer: thinwire.DiLoCo) -> Tensor:
    optimizer.eval()
    found = flat(model.parameters()).clone()
    optimizer.train()
    return found


def places_of(model: nn.Module, fragments: Iterable[Fragment]) -> list[Tensor]:
    """Of fragments in the flat weights."""
    starts = [0, *torch.tensor([one.numel() for one in model.parameters()]).cumsum(0).tolist()]
    return [
        torch.cat([starts[piece.parameter] + piece.start + torch.arange(piece.numel) for piece in one.pieces])
        for one in fragments
    ]


def relative_error(given: Tensor, wanted: Tensor) -> float:
    return float((given.double() - wanted).norm() / wanted.norm())


def follows_the_published_algorithms(
    comm: Communicator,
    momentum: float = 0.9,
    fragments: int = 2,
    overlap: int = 2,
    mix: float | str = 0.5,
    outer_lr: float | str = 0.7,
) -> None:
    """Algorithm 2 of Streaming DiLoCo in float64, 5 outer steps of each fragment; Algorithm 1 of DiLoCo with one
    fragment, no overlap and mix 0."""
    model = Tower()
    every = 6 if overlap else 4
    options = {"every": every, "overlap": overlap, "mix": mix, "outer_lr": outer_lr}
    optimizer = make(comm, model, torch.optim.AdamW, lr=0.01, fragments=fragments, outer_momentum=momentum, **options)
    places = places_of(model, optimizer._home.fragments)
    assert sum(map(len, places)) == NUMEL
    train(model, optimizer, 1, 5 * every + overlap)
    mine = torch.cat([outer_weights(model, optimizer), flat(model.parameters())])
    everyone = mine.new_empty(comm.size * mine.numel())
    comm.all_gather(everyone, mine)
    if comm.rank == 0:
        outer, replicas = streaming(
            Tower(),
            comm.size,
            5 * every + overlap,
            lambda weights: torch.optim.AdamW(weights, lr=0.01),
            loss_of,
            places,
            momentum=momentum,
            **options,
        )
        for (common, own), replica in zip(everyone.view(comm.size, 2, -1), replicas, strict=True):
            assert relative_error(common, outer) < 1e-6
            assert relative_error(own, replica) < 1e-6
    optimizer.close()


def outer_weights_agree(comm: Communicator, codec: str = "int4") -> None:
    """The same bits on every rank after 10 outer steps of each fragment; after `synchronize` all have them."""
    model, optimizer = trained(comm, 62, torch.optim.AdamW, lr=0.01, every=6, fragments=3, overlap=2, codec=codec)
    common = outer_weights(model, optimizer)
    optimizer.synchronize()
    assert optimizer.in_sync
    assert torch.equal(outer_weights(model, optimizer), flat(model.parameters()))
    together = torch.cat([common, flat(model.parameters())])
    everyone = together.new_empty(comm.size * together.numel())
    comm.all_gather(everyone, together)
    assert all(torch.equal(one, together) for one in everyone.view(comm.size, -1))
    optimizer.close()


def _one_outer_step_at_a_time(comm: Communicator) -> None:
    follows_the_published_algorithms(comm, fragments=1, overlap=0, mix=0.0)


ALL = (_one_outer_step_at_a_time, follows_the_published_algorithms, outer_weights_agree)


# Elastic workers


SETTINGS = Elastic(workers=3, address="here:1", timeout=60.0, join_timeout=60.0, silence=20.0)


def together(bodies: list[Callable[[], Any]]) -> list[Any]:
    """Each on a thread of its own; their results, or the first error."""
    found: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        torch.set_num_threads(1)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found[number] = bodies[number]()
        except BaseException as error:
            found[number] = error

    workers = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))]
    for one in workers:
        one.start()
    for one in workers:
        one.join(120)
        assert not one.is_alive(), "a worker hangs"
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


@pytest.fixture(autouse=True)
def meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting place for this test, in place of one that a process serves."""
    store = HashStore()
    monkeypatch.setattr(elastic_job, "reach", lambda settings: (store, "here"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for deaths and alarms more often than between machines."""
    monkeypatch.setattr(elastic, "_INTERVAL", 0.05)
    monkeypatch.setattr(communicator, "_ALARM_INTERVAL", 0.02)


def make_elastic(model: Tower, **options: Any) -> tuple[thinwire.DiLoCo, ElasticHome]:
    options = {"lr": 0.01, "every": 6, "block_size": 64, "elastic": SETTINGS} | options
    optimizer = thinwire.DiLoCo(model.named_parameters(), torch.optim.AdamW, **options)
    home = optimizer._home
    assert isinstance(home, ElasticHome)
    return optimizer, home


def step(model: Tower, optimizer: thinwire.DiLoCo, data: int) -> None:
    optimizer.zero_grad()
    loss_of(model, data, optimizer.steps + 1).backward()
    optimizer.step()


def go_on(model: Tower, optimizer: thinwire.DiLoCo, data: int, until: int) -> None:
    while optimizer.steps < until:
        step(model, optimizer, data)
