"""What an optimizer holds: saved and resumed, written by somebody, shown, forgotten, never copied."""

import copy
import io
import pickle

import pytest
import torch

from tests.optim.subject import FREEZE, LOCAL, SUBJECTS, UNUSUAL, Subject, alike, behaviour
from tests.optim.training import exchange_comm, loss_of, make_model, same, snapshot, through_a_file, train, weights
from tests.refusing import refused
from tests.zero.saved import join, save
from thinwire.comm import Communicator
from thinwire.zero import ShardedOptimizer


@behaviour(2, everywhere=True)
def a_resume_goes_on_bit_for_bit(comm: Communicator, subject: Subject) -> None:
    either = not subject.stage and "compress" in subject.entry.options.model_fields
    # What the norm is estimated by differs from step to step, and must not from run to run.
    estimated = {"max_norm": 0.05} | ({"compress": "momentum"} if either else {})
    cases = [(torch.bfloat16, moment, 2, estimated) for moment in (3, FREEZE, LOCAL + 1)]
    if subject in SUBJECTS:  # of which each meets one of these, by turns, and what is unusual two
        # The first is taken up by one that is frozen already, where freezing is of interest.
        whole = [(torch.float32, moment, 1 if at else FREEZE + 1, {}) for at, moment in enumerate(subject.moments)]
        cases = [*whole, cases[SUBJECTS.index(subject) % 3]]
    else:
        del cases[UNUSUAL.index(subject) % 3]
    for dtype, moment, before, options in cases:
        model, optimizer = subject.on_model(comm, moment, weight_decay=0.1, **options, dtype=dtype)
        saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        for groups in (optimizer.param_groups, saved["optimizer"]["param_groups"]):  # to go on at another rate
            groups[0]["lr"] *= 0.5
        expected = train(model, optimizer, range(moment, moment + 6))

        resumed = make_model(seed=5, dtype=dtype)
        again = subject.build(resumed, comm, weight_decay=0.2, **options)
        train(resumed, again, range(before))  # what was there before has to go
        resumed.load_state_dict(saved["model"])
        again.load_state_dict(saved["optimizer"])
        assert train(resumed, again, range(moment, moment + 6)) == expected
        assert same(snapshot(resumed, again), snapshot(model, optimizer))
        for name in ("bytes_sent", "bytes_uncompressed", "frozen_at", "skipped_steps"):
            assert getattr(again, name) == getattr(optimizer, name), name
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@behaviour(2, of_home=True)
def weights_written_by_somebody_are_taken_over(comm: Communicator, subject: Subject) -> None:
    """Into the parameters, or as `module.double().float()`, `vector_to_parameters` and swaps for averaged weights
    replace their data."""
    for number, moment in enumerate((0, *subject.moments, LOCAL + 1)):
        dtype = torch.bfloat16 if number % 4 in (0, 3) else torch.float32
        other = make_model(seed=9, dtype=dtype)
        model, optimizer = subject.on_model(comm, moment, dtype=dtype)
        optimizer.synchronize_weights()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = 1e-3 * rate
        if number % 2:
            for parameter, values in zip(model.parameters(), other.parameters(), strict=True):
                parameter.data = values.detach().clone()
        else:
            model.load_state_dict(other.state_dict())
        train(model, optimizer, range(moment, moment + 1))
        assert float((weights(model) - weights(other)).abs().max()) < 0.02
        optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, range(moment + 1, moment + 4))
        assert not torch.equal(weights(model), weights(other))
        optimizer.synchronize_weights()
        assert alike(comm, model)


@behaviour(2, of_home=True)
def a_model_of_another_dtype_is_refused(comm: Communicator, subject: Subject) -> None:
    model, _ = subject.on_model(comm, 1)
    model.double()
    with pytest.raises(TypeError, match=r"is torch.float64 on cpu, and was torch.float32 on cpu when the optimizer"):
        loss_of(model, comm.rank, 1).backward()


@behaviour(2)
def reset_state_begins_anew(comm: Communicator, subject: Subject) -> None:
    model, fresh = make_model(), make_model(seed=3)
    optimizer = subject.build(model, comm)
    train(model, optimizer, range(FREEZE + 3))
    optimizer.reset_state()
    assert optimizer.steps == 0
    assert optimizer.frozen == (subject.entry.freeze_option is None)
    fresh.load_state_dict(model.state_dict())
    again = subject.build(fresh, comm)
    steps = range(FREEZE + 3, 2 * FREEZE + 6)
    assert train(model, optimizer, steps) == train(fresh, again, steps)


@behaviour(2, of_home=True)
def eval_shows_common_weights_and_train_the_ranks_own(comm: Communicator, subject: Subject) -> None:
    for moment in (3, FREEZE + 3, *((LOCAL + 1, LOCAL + 4) if subject.entry.local_steps else ())):
        model, optimizer = subject.on_model(comm, moment)
        own, sent, before = weights(model), optimizer.bytes_sent, snapshot(model, optimizer)
        optimizer.eval()
        assert alike(comm, model)
        assert optimizer.bytes_sent == sent
        optimizer.eval()
        loss_of(model, comm.rank, 99).backward()
        refused(RuntimeError, r"step\(\) was called after eval\(\): call optimizer.train\(\) first", optimizer.step)
        optimizer.zero_grad()
        optimizer.train()
        assert torch.equal(weights(model), own)
        assert same(before, snapshot(model, optimizer))
        train(model, optimizer, [moment])
        assert optimizer.last_step.applied


@behaviour(3, of_home=True)
def synchronize_weights_makes_all_ranks_alike_and_costs_nothing_where_they_are(
    comm: Communicator, subject: Subject
) -> None:
    model, optimizer = subject.on_model(comm, LOCAL + 1)
    assert optimizer.in_sync != subject.entry.local_steps
    own = weights(model)
    optimizer.synchronize_weights()
    assert optimizer.in_sync
    assert alike(comm, model)
    moved = float((weights(model) - own).abs().max())
    assert (0 < moved < 0.1) if subject.entry.local_steps else moved == 0
    before, traffic = snapshot(model, optimizer), exchange_comm(optimizer).traffic
    sent, calls = optimizer.bytes_sent, traffic.calls
    optimizer.synchronize_weights()
    assert (optimizer.bytes_sent, traffic.calls) == (sent, calls)
    assert same(before, snapshot(model, optimizer))
    train(model, optimizer, range(LOCAL + 1, LOCAL + 10))
    optimizer.synchronize_weights()
    assert bool(weights(model).isfinite().all())
    assert alike(comm, model)


@behaviour(2, of_home=True)
def synchronize_weights_before_step_is_refused_or_has_nothing_to_do(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm)
    loss_of(model, comm.rank, 0).backward()
    if subject.packs:  # ranks never hold weights of their own
        optimizer.synchronize_weights()
    else:
        refused(RuntimeError, r"between backward\(\) and step\(\): call step\(\) first", optimizer.synchronize_weights)
    optimizer.step()
    assert optimizer.last_step.applied
    assert alike(comm, model)


@behaviour(2, of_home=True)
def copies_are_refused(comm: Communicator, subject: Subject) -> None:
    optimizer = subject.build(make_model(), comm)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        refused(TypeError, rf"a {subject.name} cannot be copied or pickled.*state_dict\(\) on every", copied, optimizer)


@behaviour(1)
def states_of_others_are_refused_and_nothing_changes(comm: Communicator, subject: Subject) -> None:
    model, optimizer = subject.on_model(comm, 2)
    before = snapshot(model, optimizer)
    others = [other for other in SUBJECTS if other.stage == subject.stage and other.name != subject.name]
    for other in others:
        theirs = other.build(make_model(), comm)
        message = f"saved by {other.name} with 1 parameter groups, this is {subject.name} with 1"
        refused(ValueError, message, optimizer.load_state_dict, theirs.state_dict())
        refused(ValueError, message, optimizer.load, join([save(comm, theirs)]))
    adamw = ShardedOptimizer(make_model().parameters(), torch.optim.AdamW, comm=comm)
    refused(ValueError, "saved by AdamW", optimizer.load, join([save(comm, adamw)]))
    refused(ValueError, f"saved by {subject.name}", adamw.load, join([save(comm, optimizer)]))
    with pytest.raises(ValueError, match=f"not from {subject.name}"):
        optimizer.load_state_dict(torch.optim.AdamW(make_model().parameters()).state_dict())
    assert same(before, snapshot(model, optimizer))
