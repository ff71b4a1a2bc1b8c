"""A checkpoint of 1-bit LAMB keeps what its frozen stage has learned: a resume is bit-identical."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.optim.lamb.training import make_lamb
from tests.optim.training import make_model, through_a_file, train, weights
from thinwire.comm import threads


@pytest.mark.parametrize("stop", [1, 10, 25])
@pytest.mark.parametrize(
    ("freeze_step", "dtype", "compress"),
    [(10, torch.float32, "momentum"), ("auto", torch.bfloat16, "update")],
)
def test_a_resume_is_bit_identical(stop, freeze_step, dtype, compress) -> None:
    def rank(comm):
        options = {"freeze_step": freeze_step, "compress": compress, "bucket_bytes": 600, "betas": (0.9, 0.95)}
        model = make_model(dtype=dtype)
        optimizer = make_lamb(model, comm, **options)
        train(model, optimizer, range(stop))
        saved = through_a_file([model.state_dict(), optimizer.state_dict()])
        expected = train(model, optimizer, range(stop, stop + 16))

        resumed = make_model(seed=5, dtype=dtype)
        again = make_lamb(resumed, comm, **options)
        resumed.load_state_dict(saved[0])
        again.load_state_dict(saved[1])
        counters = saved[1]["thinwire"]["counters"]
        coefficients = counters["freeze_groups"][0]["scalars"]["coefficients"]
        assert again.get_lamb_coeffs() == [coefficients[name] for name in counters["names"]]
        assert train(resumed, again, range(stop, stop + 16)) == expected
        assert torch.equal(weights(resumed), weights(model))
        assert again.get_lamb_coeffs() == optimizer.get_lamb_coeffs()
        assert again.frozen_at == optimizer.frozen_at

    threads.run(rank, 3)


@pytest.mark.parametrize("new_size", [1, 3])
def test_another_number_of_ranks_restores_all_but_the_residuals(new_size) -> None:
    def first(comm):
        model = make_model()
        optimizer = make_lamb(model, comm)
        train(model, optimizer, range(20))
        return through_a_file([model.state_dict(), optimizer.state_dict()])

    saved_model, saved = threads.run(first, 2)[0]

    def second(comm):
        model = make_model(seed=4)
        optimizer = make_lamb(model, comm)
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(saved)
        state = optimizer.state_dict()
        torch.testing.assert_close(state["state"], saved["state"], rtol=0, atol=0)
        assert state["thinwire"]["counters"] == saved["thinwire"]["counters"]
        train(model, optimizer, range(20, 40))
        return weights(model)

    with pytest.warns(RuntimeWarning, match="saved by rank 0 of 2"):
        first_weights, *others = threads.run(second, new_size)
    assert all(torch.equal(other, first_weights) for other in others)


def test_the_state_holds_what_the_frozen_stage_has_learned() -> None:
    def rank(comm):
        model = make_model()
        optimizer = make_lamb(model, comm)
        train(model, optimizer, range(20))
        state = optimizer.state_dict()
        (of_group,) = state["thinwire"]["counters"]["freeze_groups"]
        layers = of_group["scalars"]["layers"].values()
        assert len(layers) == 6
        assert any(layer["factor"] != 1 for layer in layers)
        assert any(layer["scale"] != 1 for layer in layers)
        assert all(not torch.equal(one["exp_avg_sq_fresh"], one["denominator"]) for one in state["state"].values())

    threads.run(rank, 2)


def test_another_optimizers_state_is_refused() -> None:
    def rank(comm):
        model = make_model()
        adam = thinwire.OneBitAdam(model.parameters(), block_size=64, comm=comm)
        train(model, adam, range(3))
        with pytest.raises(ValueError, match=r"saved by OneBitAdam with 1 parameter groups, this is OneBitLamb with 1"):
            make_lamb(model, comm).load_state_dict(adam.state_dict())

    threads.run(rank, 1)
