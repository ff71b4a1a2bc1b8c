"""What is refused, and what lies beside a checkpoint."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest
import torch

from thinwire import OneBitAdam


@pytest.fixture(autouse=True)
def standalone() -> None:
    """What the room imports then, as other tests here need it."""
    pytest.importorskip("pytorch_lightning")


@pytest.fixture
def optimizer() -> OneBitAdam:
    return OneBitAdam(torch.nn.Linear(3, 2).named_parameters(), stage=2, max_norm=1.0)


class Algorithm(Enum):
    VALUE = "value"
    NORM = "norm"


def test_optimizers(optimizer: OneBitAdam) -> None:
    from thinwire.lightning.strategy import check_optimizers

    check_optimizers([optimizer], world_size=1, scaler=None)
    late = OneBitAdam(torch.nn.Linear(3, 2).named_parameters())
    late.comes_and_goes = True
    with pytest.raises(ValueError, match="OneBitAdam has 1 ranks and the Trainer 4"):
        check_optimizers([optimizer], world_size=4, scaler=None)
    with pytest.raises(ValueError, match="train DiLoCo with elastic= in a loop of your own"):
        check_optimizers([late], world_size=1, scaler=None)
    with pytest.raises(ValueError, match='use stage=1, or precision="bf16-mixed"'):
        check_optimizers([optimizer], world_size=1, scaler=object())
    with pytest.raises(TypeError, match=r"configure_optimizers\(\) returned SGD"):
        check_optimizers([optimizer, torch.optim.SGD([torch.zeros(2)])], world_size=1, scaler=None)


def test_clipping(optimizer: OneBitAdam) -> None:
    from thinwire.lightning.strategy import check_clipping

    for value, algorithm in ((None, None), (0, None), (1.0, None), (1, Algorithm.NORM), (1.0, "norm")):
        check_clipping(optimizer, value, algorithm)
    for algorithm in (Algorithm.VALUE, "value"):
        with pytest.raises(ValueError, match='gradient_clip_algorithm="value" clips every element'):
            check_clipping(optimizer, 1.0, algorithm)
    with pytest.raises(ValueError, match=r"gradient_clip_val is 2.0 and max_norm of OneBitAdam is 1.0"):
        check_clipping(optimizer, 2.0, None)


def test_an_older_state_goes_last(optimizer: OneBitAdam, tmp_path: Path) -> None:
    from thinwire.lightning.strategy import CheckpointFiles

    path = tmp_path / f".{'x' * 300}.ckpt"
    files, other = CheckpointFiles(path), CheckpointFiles(tmp_path / "other.ckpt")
    before = optimizer.param_groups[0]["lr"]
    (old,) = files.save([optimizer], "00000000")
    optimizer.param_groups[0]["lr"] = 0.5
    new, _ = files.save([optimizer, optimizer], "00000001")
    other.save([optimizer], "00000002")
    files.load(optimizer, old)
    assert optimizer.param_groups[0]["lr"] == before
    files.remove(but=["00000001"])
    files.load(optimizer, new)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match=r"copy both. The weights alone load with load_from_checkpoint"):
        files.load(optimizer, old)
    files.remove()
    assert [path.name for path in (tmp_path / "thinwire").glob("*.ckpt.*")] == ["other.ckpt.00000002.0"]
    assert CheckpointFiles.has_state(new)
    assert not CheckpointFiles.has_state({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match=r"cannot save or load the optimizers' state at s3://"):
        CheckpointFiles("s3://bucket/x.ckpt")
