"""Every optimizer gives the bits that were recorded from an earlier commit: weights, losses and bytes sent."""

import json

import pytest
import torch

from tests.optim.recorded.forms import FORMS, Form, representative
from tests.optim.recorded.record import BITS, as_json, differences, environment, expected
from tests.optim.recorded.training import run

RECORDED = json.loads(BITS.read_text())
same_cpu = pytest.mark.skipif(
    RECORDED["cpu_capability"] != torch.backends.cpu.get_cpu_capability(),
    reason=f"recorded with {RECORDED['cpu_capability']} vectors, this CPU has "
    f"{torch.backends.cpu.get_cpu_capability()}: sums over blocks add up in another order",
)


def test_every_form_is_recorded_once() -> None:
    names = [form.name for form in FORMS]
    assert len(set(names)) == len(names)
    assert set(names) == set(RECORDED["forms"])


def test_every_change_is_one_and_says_why() -> None:
    for name, changed in RECORDED["changed"].items():
        assert changed["because"]
        assert differences(RECORDED["forms"][name], changed), f"{name} gives what it gave"


@same_cpu
@pytest.mark.parametrize("form", [pytest.param(form, id=form.name) for form in FORMS if representative(form)])
def test_the_bits_are_those_recorded(form: Form) -> None:
    recorded = {key: RECORDED[key] for key in environment()}
    assert not differences(expected(RECORDED, form.name), as_json(run(form))), (
        f"recorded from commit {RECORDED['commit']} with {recorded}, here {environment()}"
    )


@same_cpu
def test_other_weights_have_other_bits() -> None:
    """The comparison sees a learning rate that differs in its last place."""
    form = Form("OneBitAdam", stage=0)
    other = Form("OneBitAdam", stage=0, options={"lr": 0.01 * (1 + 2**-20)})
    found = differences(expected(RECORDED, form.name), as_json(run(other)))
    assert [difference.split()[0] for difference in found] == ["weights", "losses"]
