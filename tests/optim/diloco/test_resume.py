"""A run that is saved and taken up again, on as many ranks or others, also while a fragment is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optim.diloco.reference import flat
from tests.optim.diloco.tower import Tower, make, outer_weights, train
from tests.optim.training import through_a_file
from tests.zero.saved import Saved, join, save
from thinwire.comm import Communicator, threads

OPTIONS: dict[str, Any] = {"lr": 0.01, "every": 6, "fragments": 2, "overlap": 2, "codec": "int4"}


@pytest.mark.parametrize(
    ("stopped_at", "codec"),
    [(1, "int4"), (4, "stat2"), (5, "fp8"), (7, "int8"), (12, "sign1")],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(workers: int, stopped_at: int, codec: str) -> None:
    def body(comm: Communicator) -> None:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, **OPTIONS | {"codec": codec})
        train(model, optimizer, 1, stopped_at)
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        train(model, optimizer, stopped_at + 1, 26)

        other = Tower()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        resumed = make(comm, other, torch.optim.AdamW, **OPTIONS | {"codec": codec, "lr": 0.5})
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        assert resumed.steps == stopped_at
        train(other, resumed, stopped_at + 1, 26)
        assert torch.equal(flat(other.parameters()), flat(model.parameters()))
        assert torch.equal(outer_weights(other, resumed), outer_weights(model, optimizer))
        assert resumed.bytes_sent == optimizer.bytes_sent

    threads.run(body, workers)


@pytest.mark.parametrize(("workers", "others"), [(2, 3), (3, 2), (2, 1), (1, 2)])
def test_another_number_of_workers_goes_on_from_the_outer_weights_and_the_means(workers: int, others: int) -> None:
    def run(comm: Communicator) -> Any:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, **OPTIONS)
        train(model, optimizer, 1, 10)  # one fragment is under way
        parts = save(comm, optimizer)
        return parts, outer_weights(model, optimizer), flat(model.parameters()), optimizer

    ran = threads.run(run, workers)
    saved: Saved = join([one[0] for one in ran])
    mean_replica = torch.stack([one[2] for one in ran]).mean(0)

    def resume(comm: Communicator) -> None:
        model = Tower()
        resumed = make(comm, model, torch.optim.AdamW, **OPTIONS)
        resumed.load(saved)
        assert resumed.steps == 10
        assert torch.equal(outer_weights(model, resumed), ran[0][1])
        torch.testing.assert_close(flat(model.parameters()), mean_replica)
        moments = [ran[rank][3].inner.state[ran[rank][3].param_groups[0]["params"][0]] for rank in range(workers)]
        mean = torch.stack([one["exp_avg"] for one in moments]).mean(0)
        torch.testing.assert_close(resumed.inner.state[resumed.param_groups[0]["params"][0]]["exp_avg"], mean)
        train(model, resumed, 11, 30)
        resumed.synchronize()
        assert torch.isfinite(flat(model.parameters())).all()

    threads.run(resume, others)


def test_a_run_goes_on_with_other_fragments_and_intervals() -> None:
    def body(comm: Communicator, saved: Saved | None = None, **changed: Any) -> Any:
        model = Tower()
        optimizer = make(comm, model, torch.optim.AdamW, **OPTIONS | changed)
        if saved is None:
            train(model, optimizer, 1, 10)
            return save(comm, optimizer)
        optimizer.load(saved)
        train(model, optimizer, 11, 20)
        return outer_weights(model, optimizer)

    saved = join(threads.run(body, 2))
    assert saved.names("arriving"), "no fragment was under way"
    first, second = threads.run(lambda comm: body(comm, saved, every=5, fragments=1, overlap=0), 2)
    assert torch.equal(first, second)


def test_another_optimizers_state_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model = Tower()
        state = make(comm, model, torch.optim.AdamW, **OPTIONS).state_dict()
        with pytest.raises(ValueError, match="DiLoCo of AdamW"):
            make(comm, model, torch.optim.SGD, **OPTIONS).load_state_dict(state)

    threads.run(body, 2)
