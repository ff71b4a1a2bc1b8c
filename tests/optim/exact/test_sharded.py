"""The exact optimizers sharded: every stage has the same bits, every parameter one owner, and what one job saved
another takes up, whatever its stage and size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.optim.training import make_model, weights
from tests.zero.saved import join, save
from tests.zero.training import build, by_one_process, train
from thinwire.comm import Communicator, threads
from thinwire.optim import Lamb, Lion, Muon
from thinwire.zero import ShardedOptimizer

LAMB = {"optimizer_class": Lamb, "lr": 1e-2, "weight_decay": 0.1}
MUON = {"optimizer_class": Muon, "muon_lr": 1e-2, "adam_lr": 3e-3, "weight_decay": 0.1}
LION = {"optimizer_class": Lion, "lr": 1e-3, "weight_decay": 0.1}
ALL = pytest.mark.parametrize("options", [LAMB, MUON, LION], ids=["Lamb", "Muon", "Lion"])


@ALL
@pytest.mark.parametrize(("ranks", "dtype"), [(1, None), (2, torch.bfloat16), (3, None), (4, torch.bfloat16)])
def test_every_stage_has_the_bits_of_stage_0(ranks: int, options: dict, dtype: torch.dtype | None) -> None:
    def body(comm: Communicator, stage: int) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=dtype, max_norm=0.5, **options)
        train(optimizer, model, range(8))
        return weights(model)

    of_stage = [threads.run(lambda comm, stage=stage: body(comm, stage), ranks) for stage in (0, 1, 2)]
    for of_rank in of_stage:
        for mine in of_rank:
            assert torch.equal(mine, of_stage[0][0])


@ALL
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accumulation_and_clipping_are_those_of_one_process(stage: int, options: dict) -> None:
    def body(comm: Communicator) -> Tensor:
        model = make_model()
        optimizer = build(comm, model, stage, max_norm=0.5, **options)
        train(optimizer, model, range(6), accumulation=2)
        return weights(model)

    expected = by_one_process(3, 6, accumulation=2, max_norm=0.5, **options)
    # Newton-Schulz works in bf16, and Lion takes signs: a difference in the last bit becomes a part of a step.
    tolerance = {"Lamb": 2e-6, "Muon": 2e-3, "Lion": 2.1e-3}[options["optimizer_class"].__name__]
    for mine in threads.run(body, 3):
        torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_every_parameter_lies_whole_at_one_owner(stage: int, options: dict) -> None:
    def body(comm: Communicator) -> tuple[set[str], int]:
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        train(optimizer, model, range(2))
        whole = {name: one.numel() for name, one in model.named_parameters()}
        kinds = {"master", "exp_avg", "exp_avg_sq", "momentum_buffer"}
        state = [one for one in optimizer.saved_slices() if one.kind in kinds]
        assert all(one.tensor.numel() == whole[one.name] and one.start == 0 for one in state)
        owned = {one.name for one in state if one.kind == "master"}
        assert owned == {one.name for one in state}
        return owned, sum(whole[name] for name in owned)

    of_rank = threads.run(body, 2)
    names = [name for owned, _ in of_rank for name in owned]
    assert sorted(names) == sorted(name for name, _ in make_model().named_parameters())
    assert max(held for _, held in of_rank) < 0.7 * sum(held for _, held in of_rank)


@ALL
def test_what_one_job_saved_another_takes_up(options: dict) -> None:
    def first_half(comm: Communicator, stage: int):
        model = make_model()
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        train(optimizer, model, range(5))
        parts = save(comm, optimizer)
        train(optimizer, model, range(5, 9))
        return parts, weights(model)

    outcomes = threads.run(lambda comm: first_half(comm, 1), 3)
    saved, expected = join([part for part, _ in outcomes]), outcomes[0][1]

    def take_up(comm: Communicator, stage: int):
        model = make_model(seed=5)
        optimizer = build(comm, model, stage, param_dtype=torch.bfloat16, **options)
        optimizer.load(saved)
        parts = save(comm, optimizer)
        train(optimizer, model, range(5, 9))
        return parts, weights(model)

    for ranks, stage in ((3, 0), (3, 2), (1, 0), (2, 1), (4, 2)):
        outcomes = threads.run(lambda comm, stage=stage: take_up(comm, stage), ranks)
        again = join([part for part, _ in outcomes])
        assert again.kinds() == saved.kinds()
        for kind in saved.kinds():
            assert again.names(kind) == saved.names(kind)
            for name in saved.names(kind):
                numel = sum(one.tensor.numel() for one in saved._tensors[kind, name])
                assert torch.equal(again.read(kind, name, 0, numel), saved.read(kind, name, 0, numel))
        if ranks == 3:
            assert all(torch.equal(mine, expected) for _, mine in outcomes)


@pytest.mark.parametrize("options", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_a_parameter_without_a_gradient_is_left_alone_at_its_owner(options: dict) -> None:
    def body(comm: Communicator, stage: int) -> list[Tensor]:
        model = make_model()
        unused = nn.Parameter(torch.ones(9, 4))
        model.register_parameter("unused", unused)
        optimizer = build(comm, model, stage, **options)
        train(optimizer, model, range(3))
        assert torch.equal(unused.detach(), torch.ones(9, 4))
        return [one.detach().clone() for one in model.parameters()]

    stages = [threads.run(lambda comm, stage=stage: body(comm, stage), 2) for stage in (0, 1, 2)]
    for of_rank in stages:
        for mine in of_rank:
            assert all(torch.equal(one, other) for one, other in zip(mine, stages[0][0], strict=True))


def test_groups_of_muon_are_made_before_they_are_sharded() -> None:
    model = make_model()
    optimizer = ShardedOptimizer(model.parameters(), Muon, comm=threads.single(60.0), lr=0.1)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    vectors = [{"params": [model[0].bias], "use_muon": True}]
    with pytest.raises(ValueError, match="fewer than two dimensions"):
        ShardedOptimizer(vectors, Muon, comm=threads.single(60.0), lr=0.1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_torch_optimizer_of_a_rank_can_be_looked_at(stage: int) -> None:
    def body(comm: Communicator) -> int:
        model = nn.Linear(5, 3)
        optimizer = ShardedOptimizer(model.parameters(), Lamb, stage=stage, comm=comm)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        assert type(optimizer.optimizer) is Lamb
        assert all(0.01 <= one <= 10 for one in optimizer.optimizer.get_lamb_coeffs())
        return len(optimizer.optimizer.get_lamb_coeffs())

    assert threads.run(body, 3) == ([2, 2, 2] if stage == 0 else [1, 1, 0])
