"""ShardedOptimizer through a codec: against the algorithm written out for all ranks at once, at every stage; and what
must hold of residuals and replicas when steps are skipped, resumed, accumulated or resharded."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.launching import on_threads, same_on_all_ranks
from tests.optim.training import loss_of, make_model, weights
from tests.pairwise import pairwise
from tests.refusing import refused
from tests.zero.saved import join, save
from thinwire.comm import Communicator, threads
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet import PacketError
from thinwire.zero import Averaging, BucketLayout, ShardedOptimizer

TWO_OF_TWO = [0, 0, 1, 1]
CODECS = [(0, "int4"), (0, "sign1"), (1, "int4"), (1, ("stat2", "int4")), (2, "fp8"), (2, ("sign1", "sign1"))]


def build(comm: Communicator, model: nn.Module, stage: int, codec: Any, **options: Any) -> ShardedOptimizer:
    options = {"optimizer_class": torch.optim.AdamW, "lr": 1e-2, "block_size": 64} | options
    return ShardedOptimizer(
        model.parameters(), stage=stage, comm=comm, codec=codec, named_parameters=model.named_parameters(), **options
    )


def iterate(model: nn.Module, optimizer: ShardedOptimizer, step: int, factor: float = 1.0) -> None:
    (factor * loss_of(model, optimizer.comm.rank, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


class Reference:
    """All ranks of a job whose parameters lie in one bucket, as vectors [padded_numel] of the whole bucket. What the
    ranks of a worker have is added up: a worker is a rank or, if some of several nodes have several ranks, a node."""

    def __init__(self, layout: BucketLayout, stage: int, codec: Any, dtype: torch.dtype, nodes: list[int]) -> None:
        there, back = (codec, codec if stage == 0 else "int8") if isinstance(codec, str) else codec
        self.there, self.back = make_codec(there, 64), make_codec(back, 64)
        self.layout, self.stage = layout, stage
        self.model = make_model()
        self.parameters = list(self.model.parameters())
        self.master = torch.zeros(layout.padded_numel)
        for slot in layout.slots:
            self.master[slot.offset : slot.offset + slot.numel] = self.parameters[slot.parameter].detach().view(-1)
        self.replica = self.master.to(dtype, copy=True)
        self.model.to(dtype)
        by_node = 1 < len(set(nodes)) < len(nodes)
        self.workers = [[r for r, n in enumerate(nodes) if n == node] for node in range(max(nodes) + 1)]
        self.workers = self.workers if by_node else [[rank] for rank in range(len(nodes))]
        self.lost = [torch.zeros_like(self.master) for _ in self.workers]
        self.lost_by_owners = torch.zeros_like(self.master)
        self.optimizer = torch.optim.AdamW([self.master], lr=1e-2)

    def show(self) -> None:
        with torch.no_grad():
            for slot in self.layout.slots:
                one = self.parameters[slot.parameter]
                one.copy_(self.replica[slot.offset : slot.offset + slot.numel].view_as(one))

    def gradient(self, rank: int, step: int) -> Tensor:
        self.show()
        self.model.zero_grad()
        loss_of(self.model, rank, step).backward()
        found = torch.zeros_like(self.master)
        for slot in self.layout.slots:
            found[slot.offset : slot.offset + slot.numel] = self.parameters[slot.parameter].grad.view(-1)
        return found

    def step(self, step: int) -> None:
        ranks, shard = self.layout.world_size, self.layout.shard
        sent = []
        for worker, (members, lost) in enumerate(zip(self.workers, self.lost, strict=True)):
            value = sum(self.gradient(rank, step) for rank in members) * (len(self.workers) / ranks)
            sent.append(torch.empty(ranks, self.there.packet_bytes(shard), dtype=torch.uint8))
            self.there.encode(value, lost, sent[-1], self.layout.numel)
            self.lost[worker] = value
        average = torch.empty_like(self.master)
        for owner in range(ranks):
            valid = min(max(self.layout.numel - owner * shard, 0), shard)
            own = average[owner * shard :][:shard]
            self.there.decode_mean(torch.stack([of_rank[owner] for of_rank in sent]), own, valid)
        if self.stage == 0:
            average = self.through(self.there, average, self.lost_by_owners)
            average = average.to(self.replica.dtype).float()  # what `.grad` shows
        self.master.grad = average
        self.optimizer.step()
        if self.stage == 0:
            self.replica = self.master.to(self.replica.dtype, copy=True)
        else:
            ahead = self.through(self.back, self.master - self.replica, None)
            self.replica = (self.replica.float() + ahead).to(self.replica.dtype)

    def through(self, codec: Any, values: Tensor, lost: Tensor | None) -> Tensor:
        packets = torch.empty(self.layout.world_size, codec.packet_bytes(self.layout.shard), dtype=torch.uint8)
        values = values.clone()
        codec.encode(values, lost, packets, self.layout.numel)
        if lost is not None:
            lost.copy_(values)
        codec.decode(packets, values, self.layout.numel)
        return values


NODES = [[0], [0, 1], [0, 1, 2], [0, 0, 0], TWO_OF_TWO, [0, 1, 0, 1]]


@pytest.mark.parametrize(("coded", "nodes", "dtype"), pairwise(CODECS, NODES, [torch.float32, torch.bfloat16]), ids=str)
def test_every_stage_follows_the_algorithm_as_it_is_written(
    coded: tuple[int, Any], nodes: list[int], dtype: torch.dtype
) -> None:
    stage, codec = coded

    def body(comm: Communicator) -> tuple[Tensor, BucketLayout]:
        model = make_model()
        optimizer = build(comm, model, stage, codec, param_dtype=dtype, nodes=nodes)
        optimizer.gather_during_forward(model)
        for step in range(12):
            iterate(model, optimizer, step)
        optimizer.wait_for_weights()
        (bucket,) = optimizer._home._parameters.buckets
        return weights(model), bucket.layout

    found = threads.run(body, len(nodes))
    reference = Reference(found[0][1], stage, codec, dtype, nodes)
    for step in range(12):
        reference.step(step)
    reference.show()
    for mine, _ in found:
        assert torch.equal(mine, found[0][0])
        torch.testing.assert_close(mine, weights(reference.model), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:step 4 was skipped")
@pytest.mark.parametrize("nodes", [[0, 1, 2], TWO_OF_TWO], ids=str)
@pytest.mark.parametrize(("stage", "codec"), CODECS)
def test_a_step_that_is_skipped_dropped_or_resumed_leaves_what_was_there(
    stage: int, codec: Any, nodes: list[int]
) -> None:
    def first(comm: Communicator) -> tuple[Any, ...]:
        model = make_model()
        optimizer = build(comm, model, stage, codec, max_norm=0.5, nodes=nodes)
        for step in range(3):
            iterate(model, optimizer, step)
        saved, parts, before = copy.deepcopy(optimizer.state_dict()), save(comm, optimizer), weights(model)
        iterate(model, optimizer, 3, math.inf if comm.rank == 1 else 1.0)
        assert optimizer.last_step.overflow
        loss_of(model, comm.rank, 4).backward()
        optimizer.zero_grad()
        assert torch.equal(weights(model), before)
        for step in range(5, 8):
            iterate(model, optimizer, step)
        return saved, parts, weights(model)

    found = threads.run(first, len(nodes))
    checkpoint = join([parts for _, parts, _ in found])

    def second(comm: Communicator, from_file: bool) -> Tensor:
        model = make_model(seed=1)
        optimizer = build(comm, model, stage, codec, max_norm=0.5, nodes=nodes)
        iterate(model, optimizer, 9)
        if from_file:
            optimizer.load(checkpoint)
        else:
            optimizer.load_state_dict(found[comm.rank][0])
        for step in range(5, 8):
            iterate(model, optimizer, step)
        return weights(model)

    for from_file in (True, False):
        for mine in threads.run(lambda comm, f=from_file: second(comm, f), len(nodes)):
            assert torch.equal(mine, found[0][2])


@pytest.mark.filterwarnings("ignore:this state was saved")
@pytest.mark.parametrize("nodes", ["flat", [0, 1, 0, 1], [0, 1]], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_nodes_go_on_from_the_weights_and_state_without_residuals(stage: int, nodes: Any) -> None:
    def first(comm: Communicator) -> Any:
        model = make_model()
        optimizer = build(comm, model, stage, "sign1", nodes=TWO_OF_TWO)
        for step in range(4):
            iterate(model, optimizer, step)
        return save(comm, optimizer)

    checkpoint = join(threads.run(first, 4))

    @on_threads(2 if nodes == [0, 1] else 4)
    def second(comm: Communicator) -> None:
        model = make_model(seed=1)
        optimizer = build(comm, model, stage, "sign1", nodes=nodes)
        optimizer.load(checkpoint)
        assert not any(one.any() for key, one in optimizer.rank_tensors().items() if "residual" in key)
        mine, _, _ = save(comm, optimizer)
        for one in mine:
            if one.kind in ("weight", "master", "exp_avg"):
                assert torch.equal(one.tensor, checkpoint.read(one.kind, one.name, one.start, one.tensor.numel()))
        iterate(model, optimizer, 4)
        assert same_on_all_ranks(comm, weights(model))

    second()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_another_number_of_ranks_goes_on_from_the_mean_residual_and_another_stage_from_the_weights(stage: int) -> None:
    def first(comm: Communicator) -> Any:
        model = make_model()
        optimizer = build(comm, model, stage, "sign1")
        for step in range(4):
            iterate(model, optimizer, step)
        return save(comm, optimizer), weights(model)

    found = threads.run(first, 2)
    checkpoint = join([parts for parts, _ in found])

    def second(comm: Communicator, stage: int) -> dict[str, Tensor]:
        model = make_model(seed=1)
        optimizer = build(comm, model, stage, "sign1")
        optimizer.load(checkpoint)
        if stage or not checkpoint_stage:
            assert torch.equal(weights(model), found[0][1])
        return optimizer.rank_tensors()

    checkpoint_stage = stage
    for other in (0, 1, 2):
        for own in threads.run(lambda comm, o=other: second(comm, o), 3):
            for name, _ in make_model().named_parameters():
                key = f"gradient_residual.{name}"
                mean = (checkpoint.read_rank(key, 0) + checkpoint.read_rank(key, 1)) / 2
                assert mean.any()
                torch.testing.assert_close(own[key], mean)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_an_exact_checkpoint_is_taken_up_and_an_exact_optimizer_takes_up_a_rounded_one(
    comm: Communicator, stage: int
) -> None:
    model, other = make_model(), make_model(seed=1)
    exact, rounded = build(comm, model, stage, None), build(comm, other, stage, "int4")
    for step in range(3):
        iterate(model, exact, step)
        iterate(other, rounded, step)
    saved = copy.deepcopy(rounded.state_dict())
    rounded.load_state_dict(exact.state_dict())
    assert torch.equal(weights(other), weights(model))
    assert not any(one.any() for key, one in rounded.rank_tensors().items() if "residual" in key)
    iterate(other, rounded, 3)
    exact.load_state_dict(saved)
    assert {kind for state in exact.optimizer.state.values() for kind in state} == {"step", "exp_avg", "exp_avg_sq"}
    iterate(model, exact, 3)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_backwards_without_a_step_add_up_before_they_leave(comm: Communicator, stage: int) -> None:
    model, other = make_model(), make_model()
    apart, together = (build(comm, one, stage, "stat2", optimizer_class=torch.optim.SGD) for one in (model, other))
    for step in range(4):
        with apart.no_sync():
            loss_of(model, comm.rank, 2 * step).backward()
        loss_of(model, comm.rank, 2 * step + 1).backward()
        (loss_of(other, comm.rank, 2 * step) + loss_of(other, comm.rank, 2 * step + 1)).backward()
        for optimizer in (apart, together):
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(other), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(3)
def test_a_parameter_without_a_gradient_counts_as_zero_or_is_left_alone(comm: Communicator, stage: int) -> None:
    model = make_model()
    optimizer = build(comm, model, stage, "int8")
    first = model[0].weight.detach().clone()
    for step in range(6):
        without = step < 3 or comm.rank > 0
        (model[2].weight.square().sum() if without else loss_of(model, comm.rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, first) == (step < 3)
        assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1


@pytest.mark.parametrize("nodes", [[0, 1], TWO_OF_TWO], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_residuals_follow_the_loss_scale(stage: int, nodes: list[int]) -> None:
    def body(comm: Communicator, scales: tuple[float, ...]) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, "sign1", nodes=nodes)
        for step, scale in enumerate(scales):
            optimizer.loss_scale = scale
            iterate(model, optimizer, step, scale)
        return weights(model)

    plain = threads.run(lambda comm: body(comm, (1.0,) * 6), len(nodes))
    scaled = threads.run(lambda comm: body(comm, (1.0, 4.0, 4.0, 1024.0, 2.0, 2.0)), len(nodes))
    assert torch.equal(plain[0], scaled[0])


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_replicas_that_have_drifted_are_repaired(comm: Communicator, stage: int) -> None:
    model = make_model()
    optimizer = build(comm, model, stage, "int4")
    optimizer._home._comparisons._interval = 4
    iterate(model, optimizer, 0)
    if comm.rank == 1:
        for bucket in optimizer._home._parameters.buckets:
            bucket.flat += 1.0
    for step in range(1, 4):
        iterate(model, optimizer, step)
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1


@pytest.mark.parametrize("stage", [1, 2])
@on_threads(3)
def test_an_optimizer_of_whole_parameters_and_several_buckets(comm: Communicator, stage: int) -> None:
    model = make_model()
    options = {"optimizer_class": thinwire.optim.Muon, "bucket_bytes": 400, "lr": 2e-2}
    optimizer = build(comm, model, stage, ("stat2", "stat2"), **options)
    losses = [float(loss_of(model, comm.rank, 0).detach())]
    for step in range(40):
        iterate(model, optimizer, step)
    losses.append(float(loss_of(model, comm.rank, 0).detach()))
    assert losses[1] < 0.5 * losses[0]
    assert len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1


@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (1, None), (1, torch.bfloat16), (2, torch.bfloat16)])
@on_threads(4)
def test_bytes_that_are_sent(comm: Communicator, stage: int, dtype: torch.dtype | None) -> None:
    model = nn.Linear(512, 512)
    optimizer = build(comm, model, stage, "int4", param_dtype=dtype, block_size=2048)
    numel = sum(one.numel() for one in model.parameters())
    before = optimizer.bytes_sent
    model(torch.randn(2, 512).to(model.weight.dtype)).sum().backward()
    optimizer.step()
    of_ranks = [int(one) for one in comm.all_gather_bytes(str(optimizer.bytes_sent - before).encode())]
    an_element = (0.5 + 0.5 if stage == 0 else 0.5 + 1.0) * 3 / 4
    most = 8 / 7.7 * 3 / 4 if stage == 0 else 1.15 * an_element  # of what fp32 sends
    assert an_element < sum(of_ranks) / comm.size / numel < most
    assert max(of_ranks) / numel < most
    held = optimizer.model_state_bytes()
    assert held["residuals"] == pytest.approx(
        numel * (4 + (4 / comm.size if stage == 0 else 0)), rel=0.04
    )  # padding to blocks


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_node_sends_what_one_rank_would(stage: int) -> None:
    def body(comm: Communicator, nodes: Any) -> int:
        model = nn.Linear(512, 512)
        optimizer = build(comm, model, stage, ("int4", "int4"), block_size=2048, nodes=nodes)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 512)).sum().backward()
            optimizer.step()
        return optimizer.bytes_sent_between_nodes if comm.size == 4 else optimizer.bytes_sent

    by_node, of_ranks = (
        threads.run(lambda comm: body(comm, TWO_OF_TWO), 4),
        threads.run(lambda comm: body(comm, "flat"), 2),
    )
    assert by_node[0] + by_node[1] == pytest.approx(of_ranks[0], rel=0.02)  # votes, and two headers in place of one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int5"}, "codec must be one of sign1, stat2"),
        ({"codec": "bf16"}, "averaging=Averaging"),
        ({"codec": ("int4", "int8"), "stage": 0}, "stage 0 sends averages back as it sends gradients"),
        ({"codec": "int4", "block_size": 96}, "block_size must be a multiple of 64"),
        ({"codec": "int4", "averaging": Averaging(wire_dtype=torch.bfloat16)}, "neither wire_dtype nor divide_first"),
    ],
)
@on_threads(2)
def test_what_cannot_be_rounded_is_refused(comm: Communicator, options: dict[str, Any], message: str) -> None:
    given = {"stage": 1, **options}
    refused(ValueError, message, build, comm, make_model(), given.pop("stage"), given.pop("codec"), **given)


@on_threads(4)
def test_nodes_that_cannot_be_are_refused(comm: Communicator) -> None:
    refused(ValueError, r"nodes have \[3, 1\] ranks", build, comm, make_model(), 1, "int4", nodes=[0, 0, 0, 1])
    refused(ValueError, "needs codec=", build, comm, make_model(), 1, None, nodes=TWO_OF_TWO)
    refused(ValueError, "nodes must be 'auto', 'flat' or", build, comm, make_model(), 1, "int4", nodes="none")
    other = [0, 0, 1, 1] if comm.rank else [0, 1, 0, 1]
    refused(ValueError, "against", build, comm, make_model(), 1, "int4", nodes=other)


@on_threads(4)
def test_a_rank_that_has_lost_step_with_its_node_is_told_by_all_nodes(comm: Communicator) -> None:
    model = make_model()
    optimizer = build(comm, model, 1, "int4", nodes=TWO_OF_TWO)
    iterate(model, optimizer, 0)
    if comm.rank == 3:
        optimizer._home.rounded[0]._starts += 1
    refused(PacketError, "lost step", iterate, model, optimizer, 1)


@on_threads(2)
def test_ranks_with_other_codecs_are_refused(comm: Communicator) -> None:
    refused(ValueError, "codecs.*against", build, comm, make_model(), 1, "int4" if comm.rank else "int8")


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_an_overflow_on_one_rank_reaches_every_grad_scaler(comm: Communicator, stage: int) -> None:
    model = make_model(dtype=torch.float16)
    optimizer = build(comm, model, stage, "int4")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(6):
        factor = math.inf if step in (0, 3) and comm.rank == 1 else 1.0
        scaler.scale(factor * loss_of(model, comm.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (scaler.get_scale(), optimizer.steps, optimizer.skipped_steps) == (2.0**8, 4, 2)
    assert bool(weights(model).isfinite().all())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_residuals_make_good_for_a_scale_that_a_grad_scaler_tells_late(stage: int) -> None:
    """What SGD has moved by, and what is left in residuals, are together the sum of all gradients."""

    def gradient_of(rank: int, step: int) -> Tensor:
        return torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))

    def body(comm: Communicator) -> Any:
        model = nn.Linear(64, 4, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = build(comm, model, stage, "sign1", optimizer_class=torch.optim.SGD, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(7):
            scaler.scale((model.weight * gradient_of(comm.rank, step)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 32.0
        return save(comm, optimizer)

    saved = join(threads.run(body, 2))
    found = -saved.read("master" if stage else "weight", "weight", 0, 256)
    found += sum(saved.read_rank("gradient_residual.weight", rank) for rank in range(2)) / 2
    if stage == 0:
        found += saved.read("average_residual", "weight", 0, 256)
    wanted = sum(gradient_of(rank, step) for rank in range(2) for step in range(7)) / 2
    torch.testing.assert_close(found, wanted.view(-1), rtol=0, atol=1e-5)
