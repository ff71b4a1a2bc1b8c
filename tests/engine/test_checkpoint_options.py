"""What save_checkpoint and load_checkpoint can be asked for besides a folder."""

import math
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.engine.tiny import BF16, Tiny, make_engine, make_model, settings, train
from tests.launching import on_threads
from thinwire.comm import threads
from thinwire.engine import CheckpointError
from thinwire.engine.job_checkpoints import TagError


@pytest.mark.parametrize("validation", ["FAIL", "warn", "Ignore", None])
def test_ranks_that_save_under_several_tags(tmp_path, validation) -> None:
    checkpoint = {} if validation is None else {"checkpoint": {"tag_validation": validation}}

    def body(comm):
        engine = make_engine(comm, settings(**checkpoint))
        if validation == "FAIL":
            with pytest.raises(AssertionError, match=r"rank 1 .*'tag-1', rank 0 .*'tag-0'") as caught:
                engine.save_checkpoint(tmp_path, f"tag-{comm.rank}")
            assert isinstance(caught.value, TagError)
            return None
        assert engine.save_checkpoint(tmp_path, f"tag-{comm.rank}")
        return engine.load_checkpoint(tmp_path)[0]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = threads.run(body, 2)
    told = [str(one.message) for one in caught if "under rank 0's" in str(one.message)]
    assert len(told) == (1 if validation in ("warn", None) else 0)
    assert all(path is None or path.endswith("tag-0") for path in found)


def test_a_tag_may_be_a_number_and_latest_may_stay(tmp_path) -> None:
    engine = make_engine(None, settings())
    engine.save_checkpoint(tmp_path, 7)
    train(engine, range(1))
    engine.save_checkpoint(tmp_path, 8, save_latest=False)
    assert (tmp_path / "latest").read_text() == "7\n"
    with pytest.warns(RuntimeWarning, match="'8' is newer"):
        assert engine.load_checkpoint(tmp_path)[0].endswith("7")
    assert engine.load_checkpoint(tmp_path, 8)[0].endswith("8")
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_frozen_parameters_may_be_left_out(tmp_path, stage) -> None:
    def body(comm):
        engine = make_engine(comm, settings(stage))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path, "all")
        engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
        model = make_model(1)
        with torch.no_grad():
            model.frozen.fill_(3.0)
        other = make_engine(comm, settings(stage), model=model)
        other.load_checkpoint(tmp_path, "trained")
        assert torch.equal(other.module.frozen, torch.full_like(model.frozen, 3.0))
        assert torch.equal(other.module.mix.weight, engine.module.mix.weight)
        other.load_checkpoint(tmp_path, "all")
        assert torch.equal(other.module.frozen, engine.module.frozen)
        trainable = make_model(1)
        trainable.frozen.requires_grad_(True)
        with pytest.raises(CheckpointError, match=r"'frozen'.* is not in it"):
            make_engine(comm, settings(stage), model=trainable).load_checkpoint(tmp_path, "trained")

    threads.run(body, 2)
    sizes = [sum(path.stat().st_size for path in (tmp_path / tag).glob("*.safetensors")) for tag in ("all", "trained")]
    assert sizes[0] > sizes[1]


class Counting(torch.optim.Optimizer):
    """SGD that counts in numbers and in tensors of one element, which are no state of elements."""

    def __init__(self, params, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["number"] = state.get("number", 0) + 1
                state["one"] = state.get("one", torch.zeros(1)) + 1
                state["none"] = state.get("none", torch.tensor(0.0)) + 1
                state["moment"] = parameter.grad.clone()
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_threads(2)
def test_state_of_every_form_comes_back(comm, tmp_path, stage) -> None:
    engine = make_engine(comm, settings(stage, optimizer=None), optimizer=Counting)
    train(engine, range(3))
    engine.save_checkpoint(tmp_path)
    other = make_engine(comm, settings(stage, optimizer=None), seed=1, optimizer=Counting)
    other.load_checkpoint(tmp_path)
    assert train(other, range(3, 5)) == train(engine, range(3, 5))
    mine, theirs = (
        {(one.kind, one.name, one.start): one.tensor for one in each.optimizer.saved_slices()}
        for each in (engine, other)
    )
    assert mine.keys() == theirs.keys()
    assert {"scalar.number[number]", "scalar.one[1]", "scalar.none", "moment"} <= {kind for kind, *_ in mine}
    assert all(torch.equal(one, theirs[place]) and one.dtype == theirs[place].dtype for place, one in mine.items())


class Longer(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 3)


@pytest.mark.parametrize(("precision", "optimizer"), [({}, True), (BF16, True), (BF16, False)])
@on_threads(2)
def test_without_strictness_what_both_have_is_loaded(comm, tmp_path, precision, optimizer) -> None:
    engine = make_engine(comm, settings(1, **precision))
    train(engine, range(2))
    engine.save_checkpoint(tmp_path)
    longer = make_engine(comm, settings(1, **precision), model=Longer())
    before = longer.module.head.weight.clone()
    master_weights = {one.name: one.tensor.clone() for one in longer.optimizer.saved_slices() if one.kind == "master"}
    with pytest.raises(CheckpointError, match=r"'head\.weight'"):
        longer.load_checkpoint(tmp_path)
    longer.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=optimizer)
    assert torch.equal(longer.module.head.weight, before)
    for one in longer.optimizer.saved_slices():
        if one.kind == "master" and one.name.startswith("head"):
            assert torch.equal(one.tensor, master_weights[one.name])
    assert torch.equal(longer.module.layers[1].up.weight, engine.module.layers[1].up.weight)
    # And the other way round: what the model lacks is passed over.
    longer.save_checkpoint(tmp_path / "longer")
    back = make_engine(comm, settings(1, **precision), seed=2)
    back.load_checkpoint(tmp_path / "longer", load_module_strict=False, load_optimizer_states=False)
    assert torch.equal(back.module.mix.weight, engine.module.mix.weight)
    assert train(back, [2])


@pytest.mark.parametrize("precision", [{}, BF16])
def test_a_function_loads_the_weights(tmp_path, precision) -> None:
    def load(src, dst) -> None:
        assert src.keys() >= {"mix.weight", "unmix.weight", "calls"}
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name] * 2)

    def body(comm):
        engine = make_engine(comm, settings(2, **precision))
        train(engine, range(2))
        engine.save_checkpoint(tmp_path)
        other = make_engine(comm, settings(2, **precision), seed=1)
        other.load_checkpoint(tmp_path, custom_load_fn=load)
        for name, parameter in other.module.named_parameters():
            assert torch.equal(parameter, engine.module.get_parameter(name) * 2)
        assert other.global_steps == 2
        # The master weights follow what was written.
        before = other.module.mix.weight.clone()
        other.optimizer.param_groups[0]["lr"] = 0.0
        train(other, [2])
        assert torch.equal(other.module.mix.weight, before)

    threads.run(body, 2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": nn.Linear(1, 1)}, r"client_state\['best'\] is a Linear"),
        ({"a": {"b": [1, {2}]}}, r"client_state\['a'\]\['b'\]\[1\] is a set"),
        ({"a": torch.ones(2).to_sparse()}, r"client_state\['a'\] is a tensor of float32, layout torch.sparse_coo"),
        ({"a": np.array(["x"])}, r"client_state\['a'\] is of numpy's <U1"),
        ({"a": {nn.Linear: 2}}, r"client_state\['a'\] has the key <class"),
        ([1], "must be a dict, got list"),
    ],
)
@on_threads(2)
def test_bad_client_states(comm, tmp_path, state, message) -> None:
    engine = make_engine(comm, settings())
    with pytest.raises((TypeError, ValueError), match=message):
        engine.save_checkpoint(tmp_path, client_state=state if comm.rank == 1 else {})
    assert engine.load_checkpoint(tmp_path) == (None, {})


@pytest.mark.parametrize(("folder", "error"), [("", ValueError), (None, TypeError), (b"x", TypeError), (7, TypeError)])
@on_threads(2)
def test_no_folder_is_a_clear_error_on_every_rank(comm, folder, error) -> None:
    engine = make_engine(comm, settings())
    given = folder if comm.rank == 1 else "/nowhere"
    expected = error if comm.rank == 1 else ValueError
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        with pytest.raises(expected, match="must be a folder's path"):
            call(given)


def test_keep_last(tmp_path) -> None:
    engine = make_engine(None, settings(checkpoint={"keep_last": 3}))
    for step in range(5):
        train(engine, [step])
        engine.save_checkpoint(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert kept == ["global_step3", "global_step4", "global_step5"]


def test_client_state_comes_back_as_it_was(tmp_path) -> None:
    state = {
        "best": torch.randn(3, 5).to(torch.bfloat16),
        "nested": {"a": [1, (torch.tensor(7), None), {"b": torch.empty(0, 2)}], "": "x"},
        "losses": [math.nan, math.inf, -math.inf, 0.5],
        "by epoch": {0: "first", (1, 2): torch.ones(1), True: None},
        "numpy": [np.float32(1.5), np.arange(6).reshape(2, 3)[:, ::-1], np.bool_(True)],
    }

    def body(comm):
        engine = make_engine(comm, settings())
        # Rank 0's is saved.
        assert engine.save_checkpoint(tmp_path, client_state=state if comm.rank == 0 else {"other": torch.ones(1)})
        return make_engine(comm, settings(), seed=1).load_checkpoint(tmp_path)[1]

    for found in (*threads.run(body, 1), *threads.run(body, 2)):
        assert found.keys() == state.keys()
        assert torch.equal(found["best"], state["best"])
        first, (seven, none), inner = found["nested"]["a"]
        assert (first, int(seven), none, inner["b"].shape, found["nested"][""]) == (1, 7, None, (0, 2), "x")
        assert isinstance(found["nested"]["a"][1], tuple)
        assert math.isnan(found["losses"][0])
        assert found["losses"][1:] == [math.inf, -math.inf, 0.5]
        by_epoch = found["by epoch"]
        assert (by_epoch[0], float(by_epoch[1, 2]), by_epoch[True]) == ("first", 1.0, None)
        number, array, flag = found["numpy"]
        assert (type(number), number, type(flag)) == (np.float32, 1.5, np.bool_)
        assert np.array_equal(array, state["numpy"][1])
    engine = make_engine(None, settings())
    engine.save_checkpoint(tmp_path / "keyed", client_state={3: {4: (5,)}})
    assert engine.load_checkpoint(tmp_path / "keyed")[1] == {3: {4: (5,)}}


@pytest.mark.parametrize("precision", [{}, BF16])
def test_the_model_in_one_file(tmp_path, precision) -> None:
    def body(comm):
        engine = make_engine(comm, settings(2, **precision))
        train(engine, range(3))
        assert engine.save_16bit_model(tmp_path, "model.safetensors")
        assert engine.save_fp16_model(tmp_path)
        assert engine.save_16bit_model(tmp_path, "trained.pt", exclude_frozen_parameters=True)
        whole = engine.whole_state_dict()
        assert (len(whole) > 0) == (comm.rank == 0)
        assert all(torch.equal(one, engine.module.state_dict()[name]) for name, one in whole.items())
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    expected = {
        name: one.bfloat16() if one.is_floating_point() else one for name, one in threads.run(body, 2)[0].items()
    }
    pickled = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert pickled.keys() == expected.keys()
    assert all(torch.equal(pickled[name], expected[name]) for name in pickled)
    assert pickled["unmix.weight"].data_ptr() == pickled["mix.weight"].data_ptr()
    assert torch.load(tmp_path / "trained.pt", weights_only=True).keys() == expected.keys() - {"frozen"}
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys() - {"unmix.weight"}  # the tied one is there once
    assert all(torch.equal(found[name], expected[name]) for name in found)
    model = make_model(1).to(torch.bfloat16)
    assert model.load_state_dict(found, strict=False).missing_keys == ["unmix.weight"]
    assert isinstance(model, Tiny)
