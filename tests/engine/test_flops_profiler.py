"""Operations by module are what multiplying by hand gives; a training reports one step, once, on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.engine.tiny import FEATURES, HIDDEN, MICRO, make_engine, settings, train
from thinwire.comm import Communicator, threads
from thinwire.engine.flops_profiler import FlopsProfiler, get_model_profile

FORWARD = 2 * MICRO * (2 * FEATURES * FEATURES + 3 * 2 * FEATURES * HIDDEN)


class Nested(nn.Module):
    """3 batches through 5 -> 7 twice by the same layer, then a convolution on its own list."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5, bias=False)
        self.again = self.shared
        self.parts = nn.ModuleList([nn.Linear(5, 7), nn.Sequential(nn.ReLU(), nn.Linear(7, 2))])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.again(self.shared(inputs))
        for part in self.parts:
            hidden = part(hidden)
        return hidden @ torch.ones(2, 1)


def test_counts_by_module() -> None:
    model = Nested()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(torch.ones(3, 5)).sum()
    loss.backward()  # not a forward: not counted
    costs = {one.name: one for one in profiler.module_costs()}
    assert {name: one.flops for name, one in costs.items()} == {
        "": 2 * 3 * (2 * 25 + 35 + 14 + 2),
        "shared": 2 * 3 * 2 * 25,
        "parts": 2 * 3 * (35 + 14),
        "parts.0": 2 * 3 * 35,
        "parts.1": 2 * 3 * 14,
        "parts.1.0": 0,
        "parts.1.1": 2 * 3 * 14,
    }
    assert costs["parts"].params == 5 * 7 + 7 + 7 * 2 + 2
    assert costs["parts.1.1"].depth == 3
    assert profiler.get_total_macs() == 3 * (2 * 25 + 35 + 14 + 2)
    assert profiler.get_total_params() == 25 + costs["parts"].params
    assert profiler.get_total_flops(as_string=True) == "606 FLOPs"
    assert 0 < costs["parts"].seconds <= profiler.get_total_duration()
    model(torch.ones(3, 5))
    assert profiler.get_total_flops() == 2 * costs[""].flops
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0
    profiler.end_profile()
    model(torch.ones(3, 5))
    assert profiler.flops == 0
    with pytest.raises(RuntimeError, match="call start_profile"):
        profiler.get_total_flops()
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


def test_ignored_classes_have_no_line() -> None:
    profiler = FlopsProfiler(Nested())
    profiler.start_profile(ignore_list=[nn.Sequential])
    profiler.model(torch.ones(1, 5))
    assert [one.name for one in profiler.module_costs()] == ["", "shared", "parts", "parts.0"]
    assert profiler.get_total_flops() == 2 * (2 * 25 + 35 + 14 + 2)
    profiler.end_profile()


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shape"):
        get_model_profile(model, (4, 5), warm_up=0)
    assert not model._forward_hooks
    assert get_model_profile(model, (4, 3), print_profile=False, as_string=False) == (48, 24, 8)


def test_a_profile_of_a_model(capsys, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    macs = 5 * (4 * 6 * 6 * 2 * 9 + 4 * 6 * 6 * 10)
    params = 4 * 2 * 9 + 4 + 1440 + 10
    assert get_model_profile(model, (5, 2, 8, 8), as_string=False) == (2 * macs, macs, params)
    printed = capsys.readouterr().out
    assert "2: Linear" in printed
    assert f"{macs / 1e3:.2f} KMACs" in printed
    report = tmp_path / "new" / "profile.txt"
    found = get_model_profile(model, args=[torch.ones(5, 2, 8, 8)], detailed=False, output_file=str(report))
    assert found == (f"{2 * macs / 1e3:.2f} KFLOPs", f"{macs / 1e3:.2f} KMACs", f"{params / 1e3:.2f} K")
    assert "2: Linear" not in report.read_text()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": "bert"}, TypeError, "takes a torch.nn.Module, got str"),
        ({"mode": "train"}, ValueError, '"forward" or "generate", got \'train\''),
        ({}, ValueError, "give get_model_profile\\(\\) an input_shape"),
        ({"input_shape": ()}, ValueError, "must be a tuple of sizes"),
    ],
)
def test_what_cannot_be_profiled(given, error, message) -> None:
    with pytest.raises(error, match=message):
        get_model_profile(**{"model": nn.Linear(1, 1), **given})


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_training_reports_the_step_it_was_asked_for(tmp_path: Path, capsys, accumulation: int) -> None:
    report = tmp_path / "logs" / "profile.txt"

    def rank(comm: Communicator) -> None:
        section = {"enabled": True, "profile_step": 2, "output_file": str(report), "recompute_fwd_factor": 1.0}
        config = settings(1, flops_profiler=section, gradient_accumulation_steps=accumulation)
        engine = make_engine(comm, config)
        train(engine, range(2))
        assert engine.flops_profiler.flops is None
        assert not comm.rank or not report.read_text()
        train(engine, range(2, 4))
        if comm.rank == 0:
            assert engine.flops_profiler.flops == FORWARD
            assert engine.flops_profiler.params == sum(one.numel() for one in engine.module.parameters())

    threads.run(rank, 2)
    text = report.read_text()
    assert "profile of a step after 2 steps" in text
    assert "at 3 times the forward's operations" in text
    assert f"step of {accumulation} micro-batches: " in text
    assert text.count("layers: ModuleList") == 1
    assert not capsys.readouterr().out


def test_a_resumed_training_does_not_report_again(tmp_path: Path, capsys) -> None:
    config = settings(0, flops_profiler={"enabled": True})
    comm = threads.single(60.0)
    engine = make_engine(comm, config)
    losses = train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    assert capsys.readouterr().out.count("profile of a step after 1 steps") == 1
    resumed = make_engine(comm, config)
    resumed.load_checkpoint(tmp_path)
    train(resumed, range(3, 6))
    assert not capsys.readouterr().out
    assert losses == train(make_engine(comm, settings(0)), range(3))


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank(comm: Communicator) -> None:
        section = {"enabled": True, "output_file": str(tmp_path / "file" / "profile.txt")}
        with pytest.raises((OSError, ValueError), match="file"):
            make_engine(comm, settings(1, flops_profiler=section))
        comm.barrier()

    threads.run(rank, 2)
