"""Lightning as it is installed: on two processes that lightning.pytorch starts by itself, one launch for all, as
imports take longest; and on one, here, with the standalone pytorch_lightning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.launching import Jobs
from tests.lightning.tiny import RATE, flat, make_module_class, make_trainer
from thinwire import OneBitAdam


@pytest.mark.launch
def test_two_ranks(jobs: Jobs, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = jobs.alone("-m", "tests.lightning.program", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all held with 2 ranks" in done.stdout


@pytest.fixture
def standalone(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """pytorch_lightning in a process that has not imported its twin; the process group that it makes goes with it."""
    package = pytest.importorskip("pytorch_lightning")
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    yield package
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def compressed(module: Any) -> OneBitAdam:
    return OneBitAdam(module.named_parameters(), lr=RATE, freeze_step=2, max_norm=1.0)


def test_the_standalone_package(standalone: ModuleType, tmp_path: Path) -> None:
    import thinwire.lightning

    assert issubclass(thinwire.lightning.ThinwireStrategy, standalone.strategies.DDPStrategy)
    assert thinwire.lightning.register() == ["pytorch_lightning"]
    kind = make_module_class(standalone)

    def train(seed: int, epochs: int, strategy: Any, checkpoint: Path | None = None) -> Any:
        module = kind(compressed, seed, batches=4)
        trainer = make_trainer(
            standalone, tmp_path, strategy=strategy, devices=1, max_epochs=epochs, gradient_clip_val=1.0
        )
        trainer.fit(module, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module

    whole = train(0, 2, thinwire.lightning.ThinwireStrategy())
    train(0, 1, "thinwire")
    resumed = train(1, 2, "thinwire", tmp_path / "1.ckpt")
    assert torch.equal(flat(whole), flat(resumed))
    assert whole.losses[4:] == resumed.losses
    assert sorted(path.name.rsplit(".", 2)[0] for path in (tmp_path / "thinwire").glob("*.ckpt.*")) == [
        "1.ckpt",
        "2.ckpt",
    ]

    def torchs(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters())

    with pytest.raises(TypeError, match=r"returned AdamW.*return thinwire.OneBitAdam"):
        make_trainer(standalone, tmp_path, devices=1).fit(kind(torchs))
    with pytest.raises(
        ValueError, match=r"gradient_clip_val is 0.5 and max_norm of OneBitAdam is 1.0: pass max_norm=0.5"
    ):
        make_trainer(standalone, tmp_path, devices=1, gradient_clip_val=0.5).fit(kind(compressed))

    class ClipsBySelf(kind):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    with pytest.raises(ValueError, match=r"pass max_norm=0.1 to OneBitAdam"):
        make_trainer(standalone, tmp_path, devices=1).fit(ClipsBySelf(compressed))
    remote = standalone.callbacks.ModelCheckpoint("memory://folder")
    with pytest.raises(ValueError, match=r"ModelCheckpoint saves to memory://folder, .* that all ranks have mounted"):
        make_trainer(standalone, tmp_path, devices=1, callbacks=[remote], enable_checkpointing=True).fit(
            kind(compressed)
        )

    # A checkpoint of another strategy: of one rank's state, or of another optimizer.
    for build in (compressed, torchs):
        trainer = make_trainer(standalone, tmp_path, devices=1, strategy="auto")
        trainer.fit(kind(build, batches=4))
        trainer.save_checkpoint(tmp_path / "other.ckpt")
        resumed = kind(compressed, batches=4)
        trainer = make_trainer(standalone, tmp_path, devices=1, max_epochs=2)
        if build is torchs:
            with pytest.raises(ValueError, match=r"it is not from OneBitAdam"):
                trainer.fit(resumed, ckpt_path=tmp_path / "other.ckpt")
            continue
        trainer.fit(resumed, ckpt_path=tmp_path / "other.ckpt")
        assert trainer.optimizers[0].steps == 8
        with pytest.raises(
            ValueError, match=r"holds the state of 0 optimizers, and configure_optimizers\(\) returned 1"
        ):
            trainer.strategy.load_optimizer_state_dict({"optimizer_states": []})
