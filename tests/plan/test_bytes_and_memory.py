"""Predicted bytes beside what the library sends and holds in a real run, on threads."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.strategies import ethernet
from thinwire import DiLoCo, OneBitAdam, ShardedOptimizer
from thinwire.comm import Communicator, threads
from thinwire.compress import Exchange, make_codec
from thinwire.plan import Matrices, Method, Prediction, Schedule, Transformer, Workload, methods_for, predict
from thinwire.plan.cluster import two_legs
from thinwire.plan.methods import CODECS, OuterSchedule
from thinwire.zero.memory import live_tensor_bytes

WIDTH, LAYERS = 300, 5
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
BUCKET_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # one layer each
MODEL = Transformer("five layers", PARAMETERS, (Matrices(WIDTH, WIDTH, LAYERS),))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def predicted(method: Method, ranks: int, **schedule: object) -> Prediction:
    workload = Workload(MODEL, 0.1, 0.2)
    run = Schedule(4, 0.5, bucket_bytes=BUCKET_BYTES, **schedule)  # type: ignore[arg-type]
    return predict(workload, ethernet(ranks), method, run)


def sent_a_step(make: Callable[[nn.Module, Communicator], torch.optim.Optimizer], ranks: int) -> list[int]:
    """Bytes that rank 0 sends in each of five steps; the third ends with the freeze."""

    def rank(comm: Communicator) -> list[int]:
        model = make_model()
        optimizer = make(model, comm)
        sent = [optimizer.bytes_sent]  # type: ignore[attr-defined]
        for _ in range(5):
            model(torch.randn(7, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(optimizer.bytes_sent)  # type: ignore[attr-defined]
        return [after - before for before, after in itertools.pairwise(sent)]

    return threads.run(rank, ranks)[0]


@pytest.mark.parametrize("codec", ["sign1", "stat2", "int4", "fp8", "int8", "bf16", "none"])
def test_bytes_of_every_codec(codec) -> None:
    def rank(comm: Communicator) -> int:
        Exchange(comm, PARAMETERS, make_codec(codec)).average(torch.zeros(PARAMETERS))
        return comm.traffic.bytes_sent

    assert two_legs(ethernet(3), PARAMETERS, codec).bytes_sent == threads.run(rank, 3)[0]


@pytest.mark.parametrize(
    ("wire", "stage"), [("bf16", 0), ("bf16", 1), ("int4", 0), ("int4", 1), ("int4", 2), ("int8", 1)]
)
def test_bytes_of_a_warmups_wire(wire, stage: int) -> None:
    """On 5 ranks, of which shards are padded."""
    options = {"freeze_step": 3, "bucket_bytes": BUCKET_BYTES, "warmup_wire": wire, "stage": stage}
    sent = sent_a_step(lambda model, comm: OneBitAdam(model.parameters(), comm=comm, **options), 5)
    phases = predicted(Method("onebit-adam", stage), 5, warmup_wire=wire, resync_interval=10**9).phases
    assert sent[1] == pytest.approx(phases["warmup"].bytes_sent, rel=0.01)
    assert sent[4] == pytest.approx(phases["frozen"].bytes_sent, rel=0.01)


@pytest.mark.parametrize(("ranks", "stage"), [(3, 1), (2, 2)])
def test_bytes_of_adam_on_shards(ranks: int, stage: int) -> None:
    sent = sent_a_step(
        lambda model, comm: ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, comm=comm, stage=stage, bucket_bytes=BUCKET_BYTES
        ),
        ranks,
    )
    assert sent[4] == pytest.approx(predicted(Method("sharded-adam", stage), ranks).average.bytes_sent, rel=0.02)


FORMS = [(method.algorithm, method.stage) for method in methods_for(ethernet()) if method.entry is not None]
SHARDED = [form for form in FORMS if form[1] and form[0] != "onebit-muon"]


@pytest.mark.parametrize(
    ("algorithm", "stage", "dtype", "by_node"),
    [
        *((*form, "bf16", False) for form in FORMS),
        *((name, stage, "fp32", False) for name, stage in FORMS if stage < 2),
        *((*form, ("bf16", "fp32")[number % 2], True) for number, form in enumerate(SHARDED)),
        ("onebit-muon", 0, "fp32", True),
    ],
)
def test_every_optimizer_of_the_registry(algorithm: str, stage: int, dtype, by_node: bool) -> None:
    """Bytes of a warm and of a compressed step, and what is held then, gradients dropped; formulas know no padding."""
    cluster, nodes = (ethernet(2, 2), [0, 0, 1, 1]) if by_node else (ethernet(3), [0, 1, 2])
    bucket_bytes = BUCKET_BYTES * (LAYERS if by_node else 1)  # of which shards of 4 ranks are hardly padded
    method = Method(algorithm, stage, hierarchical=by_node)
    entry = method.entry
    param_dtype = None if dtype == "fp32" else torch.bfloat16
    freeze = {} if entry.freeze_option is None else {entry.freeze_option: 3}

    def rank(comm: Communicator) -> tuple[list[int], list[int], int]:
        model = make_model()
        options = {"comm": comm, "stage": stage, "bucket_bytes": bucket_bytes, "param_dtype": param_dtype, **freeze}
        options["nodes"] = nodes
        optimizer = entry.load()(model.named_parameters(), **options)
        sent, held, between = [optimizer.bytes_sent], [], []
        for _ in range(6):
            model(torch.randn(7, WIDTH, dtype=param_dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append(optimizer.bytes_sent)
            held.append(sum(live_tensor_bytes(model, optimizer).values()))
            between.append(optimizer.bytes_sent_between_nodes)
        return [after - before for before, after in itertools.pairwise(sent)], held, between[5] - between[4]

    found = threads.run(rank, len(nodes))
    sent = [sum(of_ranks) / len(found) for of_ranks in zip(*(one for one, _, _ in found), strict=True)]
    held = found[0][1]
    run = Schedule(100, 0.5, bucket_bytes=bucket_bytes, resync_interval=10**9)
    prediction = predict(Workload(MODEL, 0.1, 0.2, dtype=dtype), cluster, method, run)
    first, *_ = prediction.phases.values()
    compressed = prediction.phases["1-bit gradients" if entry.local_steps else [*prediction.phases][-1]]
    assert sent[1] == pytest.approx(first.bytes_sent, rel=0.02)
    assert sent[5] == pytest.approx(compressed.bytes_sent, rel=0.02)
    between = sum(one for _, _, one in found) / len(found)
    assert between * cluster.ranks_per_node == pytest.approx(compressed.bytes_between, rel=0.02)
    moments = [(0.0, 5, 0.05)]
    if stage == 0 and entry.freeze_option and not entry.local_steps:
        moments.append((1.0, 1, 0.1))  # before the freeze
    for warmup, step, error in moments:
        run = predict(Workload(MODEL, 0.1, 0.2, dtype=dtype), cluster, method, Schedule(100, warmup))
        assert held[step] == pytest.approx(run.memory_bytes - run.memory["gradients"], rel=error), warmup


@pytest.mark.parametrize(
    ("codec", "fragments", "nodes", "share"),
    [
        *((codec, 5, None, {}) for codec in CODECS),
        ("int4", 1, None, {}),
        ("int4", 5, [0, 0, 1, 1], {}),
        ("none", 5, [0, 0, 1, 1], {}),
        ("int4", 1, None, {"exp_avg": 1, "exp_avg_sq": 1}),
    ],
)
def test_bytes_and_memory_of_diloco(codec, fragments, nodes, share) -> None:
    """Byte for byte what a run sends on average and in a burst; and to a tenth, as formulas know no padding, what is
    held for outer steps."""
    ranks, every = 4, 5

    def rank(comm: Communicator) -> tuple[list[int], dict[str, float]]:
        model = make_model()
        options: dict[str, Any] = {
            "every": every,
            "fragments": fragments,
            "codec": codec,
            "nodes": nodes or "flat",
            "comm": comm,
            "share": share,
        }
        optimizer = DiLoCo(model.named_parameters(), torch.optim.AdamW, **options)
        sent = [(optimizer.bytes_sent, optimizer.bytes_sent_between_nodes)[nodes is not None]]
        for _ in range(11):
            model(torch.randn(7, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent.append((optimizer.bytes_sent, optimizer.bytes_sent_between_nodes)[nodes is not None])
        return [after - before for before, after in itertools.pairwise(sent)], optimizer.model_state_bytes()

    (sent, held), *_ = threads.run(rank, ranks)
    run = Schedule(100, outer=OuterSchedule(every, fragments, codec=codec, share=share))
    cluster = ethernet(ranks) if nodes is None else ethernet(2, 2)
    prediction = predict(Workload(MODEL, 0.1, 0.2), cluster, Method("diloco", hierarchical=nodes is not None), run)
    part = 1 if nodes is None else 2  # a node's bytes are its ranks'
    found = [prediction.average, prediction.phases["outer"]]
    average, burst = (one.bytes_sent if nodes is None else one.bytes_between / part for one in found)
    assert sum(sent[1:]) == pytest.approx(10 * average, rel=1e-9)  # leg 2 leaves in the step after leg 1
    two_steps = (sent[step] + sent[step + 1] for step in range(1, 10))
    assert max(two_steps) == pytest.approx(burst if fragments == 1 else 2 * burst, rel=1e-9)
    assert prediction.shares["outer"] == pytest.approx(fragments / every)
    for kind in ("outer weights", "outer momentum", *(["residuals"] if codec != "none" else [])):
        assert prediction.memory[kind] == pytest.approx(held[kind], rel=0.1), kind


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 50])
def test_padding_of_matrices_that_have_one_owner_each(ranks: int) -> None:
    """As where every matrix is dealt to an owner, the largest first."""
    kinds = (Matrices(2, 3, 4), Matrices(5, 5, 3), Matrices(1, 6, 9), Matrices(7, 1, 1))
    numels = sorted((one.rows * one.columns for one in kinds for _ in range(one.count)), reverse=True)
    most = max((place // ranks + 1) * numel for place, numel in enumerate(numels) if place % ranks == 0)
    model = Transformer("a model", sum(numels) + 40, kinds)
    assert model.padded_elements(ranks) == 40 + max(sum(numels), most * ranks)
