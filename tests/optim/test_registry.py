"""The registry says what the classes say: nobody else keeps a list of what optimizers take. And what every optimizer in
it says of bytes, and that any number of ranks takes up the state of rank 0."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tests.optim.subject import FREEZE, LOCAL, SUBJECTS, Subject
from tests.optim.training import make_model, through_a_file, train, weights
from thinwire.comm import Communicator, threads
from thinwire.optim import registry

ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("registry", sys.argv[1])
sys.modules["registry"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch" not in sys.modules
print(*module.NAMES)
"""


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(registry.entry(name).load()).parameters)


def build(name: str, stage: int) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer = registry.entry(name).load()([parameter], stage=stage, comm=threads.single(10.0))
    return optimizer


@pytest.mark.parametrize("name", registry.NAMES)
def test_options_are_the_constructors_with_its_defaults(name: str) -> None:
    taken = parameters_of(name)
    for option, field in registry.entry(name).options.model_fields.items():
        if option != "comm_backend_name":  # the engine makes it a communicator
            assert taken[option].default == field.default or option in ("codec", "compress")
            assert registry.entry(name).options.model_validate({option: field.default})


@pytest.mark.parametrize("name", registry.NAMES)
def test_stages(name: str) -> None:
    entry = registry.entry(name)
    assert {*entry.stages, *entry.refused_stages} == {0, 1, 2, 3}
    for stage in entry.stages:
        build(name, stage)
    for stage in entry.refused_stages:
        with pytest.raises(ValueError, match=f"stage must be .* for {name}, got {stage}"):
            build(name, stage)


@pytest.mark.parametrize("name", registry.NAMES)
def test_clips_offloads_and_freezes(name: str) -> None:
    entry, taken = registry.entry(name), parameters_of(name)
    assert "max_norm" in taken
    assert entry.offloads <= ("offload" in taken)
    assert entry.freeze_option is None or entry.freeze_option in entry.options.model_fields


def test_another_name_is_told_the_names() -> None:
    with pytest.raises(KeyError, match="'OneBitAdem' is not one of OneBitAdam, OneBitLamb, ZeroOneAdam, OneBitLion"):
        registry.entry("OneBitAdem")


def test_it_needs_no_torch() -> None:
    command = [sys.executable, "-c", ALONE, str(Path(str(registry.__file__)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == list(registry.NAMES), done.stderr


# What rank 0 says of bytes, where it speaks at all


def said(capsys: pytest.CaptureFixture[str], subject: Subject, steps: int, ranks: int = 2, **options) -> list[str]:
    """What one run writes to stderr."""

    def body(comm: Communicator) -> None:
        comm.speaks = comm.rank == 0
        model = make_model()
        optimizer = subject.build(model, comm, **options)
        train(model, optimizer, range(steps))
        optimizer.close()
        optimizer.close()

    threads.run(body, ranks)
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_run_says_what_it_saves(capsys: pytest.CaptureFixture[str], subject: Subject) -> None:
    first, *freeze, last = said(capsys, subject, 40)
    # 6 * 37 + 37 + 37 * 11 + 11 + 11 + 1 elements of 4 bytes, of which half travels twice.
    assert first.startswith(f"thinwire: {subject.name} on 2 ranks: 2.76 kB a step uncompressed; it ")
    if subject.entry.freeze_option is None:
        assert first.endswith("it compresses from the first step on")
        assert not freeze
    else:
        assert first.endswith(f"it freezes by {subject.entry.freeze_option}=6")
        assert len(freeze) == 1
        assert freeze[0].startswith(f"thinwire: {subject.name} froze after step 6: ")
        assert freeze[0].endswith(" kB a step from now on instead of 2.76 kB")
    assert last.startswith(f"thinwire: {subject.name} sent ")
    assert " in 40 steps, " in last


def test_a_run_that_never_freezes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, last = said(capsys, Subject("OneBitAdam", 0), 5, freeze_step=1000)
    assert last.endswith(
        "OneBitAdam never froze in 5 steps, so that it saved nothing to speak of: freeze_step=1000 should come after "
        "about a fifth of the steps"
    )


def test_one_rank_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, Subject("OneBitAdam", 0), 3, ranks=1) == []


def test_nobody_speaks_who_was_not_asked(capsys: pytest.CaptureFixture[str]) -> None:
    threads.run(lambda comm: train(model := make_model(), Subject("OneBitAdam", 0).build(model, comm), range(3)), 2)
    assert capsys.readouterr().err == ""


def saved_by_2_ranks(subject: Subject, moment: int) -> dict:
    def body(comm):
        model = make_model()
        optimizer = subject.build(model, comm)
        train(model, optimizer, range(moment))
        return through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    return threads.run(body, 2)[0]


@pytest.mark.parametrize("new_size", [1, 2, 3])
@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.stage], ids=str)
def test_rank_0s_file_on_all_ranks(subject: Subject, new_size: int) -> None:
    moment = LOCAL + 1 if subject.entry.local_steps else FREEZE + 3
    saved = saved_by_2_ranks(subject, moment)

    def body(comm):
        model = make_model(seed=4)
        optimizer = subject.build(model, comm)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert optimizer.frozen
        state = optimizer.state_dict()
        torch.testing.assert_close(state["state"], saved["optimizer"]["state"], rtol=0, atol=0)
        assert state["thinwire"]["counters"] == saved["optimizer"]["thinwire"]["counters"]
        train(model, optimizer, range(moment, moment + 20))
        optimizer.synchronize_weights()
        return weights(model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = threads.run(body, new_size)
    assert all(torch.equal(result, results[0]) for result in results)
    messages = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(messages) == (1 if new_size == 2 else new_size)  # rank 0 of 2 is where the file comes from
    assert all("saved by rank 0 of 2" in message for message in messages)


@pytest.mark.parametrize("subject", [one for one in SUBJECTS if not one.stage and one.entry.offloads], ids=str)
def test_what_it_lacks_starts_from_zero_where_a_rank_had_residuals_of_its_own(subject: Subject) -> None:
    saved, found = saved_by_2_ranks(subject, FREEZE + 3), []
    for earlier in (0, FREEZE + 5):
        model = make_model(seed=4)
        optimizer = Subject(subject.name, 1).build(model, threads.single(30.0))
        train(model, optimizer, range(earlier))
        model.load_state_dict(saved["model"])
        with pytest.warns(RuntimeWarning, match="residuals belong to one rank"):
            optimizer.load_state_dict(saved["optimizer"])
        found.append(train(model, optimizer, range(FREEZE + 3, FREEZE + 9)))
    assert found[0] == found[1]
