"""`thinwire config check`: what it says of a file, and how it exits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_published import ZERO_3
from thinwire.command_line import main

BERT: dict[str, Any] = {
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 23000, "cuda_aware": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 300}},
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "zero_optimization": {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
}


def row(told: str, key: str) -> str:
    """The value beside a key in the table."""
    (found,) = [line.split(None, 1)[1] for line in told.splitlines() if line.startswith(f"  {key} ")]
    return found


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def run(tree: Any, *arguments: str) -> tuple[int, str]:
        path = tmp_path / "config.json"
        path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
        code = main(["config", "check", str(path), *arguments])
        printed = capsys.readouterr()
        assert not printed.err
        assert str(path) in printed.out
        return code, printed.out

    return run


def test_what_a_file_will_do(check) -> None:
    code, told = check(BERT, "--world-size", "8")
    assert code == 0
    assert row(told, "train_batch_size") == "4096 samples a step: 32 x 16 on each of 8 ranks"
    assert "initial_scale_power 12, loss_scale_window 1000" in row(told, "fp16")
    assert row(told, "zero_optimization").startswith("stage 1, reduce_bucket_size 4194304, overlap_comm true")
    assert 'offload_optimizer {device "cpu", pin_memory false}' in row(told, "zero_optimization")
    optimizer = row(told, "optimizer")
    assert optimizer.startswith("OneBitAdam: lr 0.0004, betas [0.9, 0.999], weight_decay 0.0, block_size 2048")
    assert "freeze_step 23000" in optimizer
    assert 'codec "sign1"' in optimizer
    assert row(told, "scheduler") == 'WarmupLR: warmup_min_lr 0.0, warmup_num_steps 300, warmup_type "log"'
    assert row(told, "gradient_clipping") == "1.0"
    assert 'No effect: "optimizer.params.cuda_aware". Whatever it says, ' in told


def test_defaults_are_told_too(check) -> None:
    code, told = check({"train_batch_size": 6, "optimizer": {"type": "AdamW"}})
    assert code == 0
    assert row(told, "train_batch_size") == "6 samples a step: 1 x 6 on each of 1 rank"
    assert row(told, "optimizer").startswith(
        "AdamW: lr 0.001, maximize false, betas [0.9, 0.999], eps 1e-08, weight_decay 0.0,"
    )
    assert row(told, "seed") == "0"
    assert '"gradient_clipping" is not set, so gradients are not clipped' in told
    assert "No effect" not in told
    assert "not clipped" not in check({"train_batch_size": 6, "gradient_clipping": 0})[1]
    inner = {"type": "DiLoCo", "params": {"every": 9, "inner": {"type": "SGD", "params": {"lr": 0.5}}}}
    told = row(check({"train_batch_size": 6, "optimizer": inner})[1], "optimizer")
    assert told.startswith("DiLoCo: every 9, outer_momentum 0.9, ")
    assert ", around SGD: lr 0.5, " in told


def test_the_ranks_that_three_sizes_ask_for(check) -> None:
    tree = {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert row(check(tree)[1], "train_batch_size") == "96 samples a step: 3 x 4 on each of 8 ranks"
    code, told = check(tree, "--world-size", "2")
    assert code == 1
    assert "gradient_accumulation_steps 12" in told
    assert check(tree | {"train_batch_size": 97})[0] == 1


def test_everything_wrong_is_told_with_what_to_do(check) -> None:
    code, told = check({"train_batch_size": 3, "autotuning": {"enabled": True}, "fp61": {}}, "--world-size", "2")
    assert code == 1
    assert "`thinwire plan`" in told
    assert 'Did you mean "fp16"?\n' in told
    assert "the nearest train_batch_size that works is 2 or 4." in told
    assert told.count("\n- ") == 3


def test_what_cannot_be_checked(check, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tree, arguments, message in (
        ("{", (), "the text ends inside an object"),
        ("[1]", (), "must hold a JSON object"),
        (BERT, ("--world-size", "0"), "world_size must be a whole number of ranks, at least 1, got 0"),
    ):
        code, told = check(tree, *arguments)
        assert code == 1
        assert message in told
    assert main(["config", "check", str(tmp_path / "none.json")]) == 1
    assert "cannot be read: No such file" in capsys.readouterr().out


ON: dict[str, tuple[Any, str]] = {
    "fp16": ({"enabled": True, "loss_scale": 128}, "loss_scale 128.0"),
    "activation_checkpointing": ({"modules": ["BertLayer"], "cpu_checkpointing": True}, 'modules ["BertLayer"], cpu_'),
    "sparse_attention": ({"mode": "fixed", "block": 16}, 'mode "fixed", block 16'),
    "progressive_layer_drop": ({"enabled": True, "theta": 0.5, "gamma": 0.01}, "theta 0.5, gamma 0.01"),
    "steps_per_print": (10, "10"),
    "wall_clock_breakdown": (True, "true"),
    "memory_breakdown": (True, "true"),
    "log_level": ("error", '"ERROR"'),
    "csv_monitor": ({"enabled": True}, 'job_name "thinwire"'),
    "flops_profiler": ({"enabled": True, "profile_step": 5}, "profile_step 5"),
    "comms_logger": ({"enabled": True}, "prof_all true"),
    "checkpoint": ({"keep_last": 3, "async_save": True}, "keep_last 3, async_save true"),
    "dataloader_drop_last": (True, "true"),
}


def test_everything_that_may_be_on(check) -> None:
    given = {key: value for key, (value, _) in ON.items()}
    code, told = check(BERT | given | {"scheduler": None}, "--world-size", "256")
    assert code == 0
    assert all(shown in row(told, key) for key, (_, shown) in ON.items())
    assert "  scheduler " not in told
    assert "  tensorboard " not in told


def test_what_a_trainer_fills_in(check) -> None:
    code, told = check(ZERO_3)
    assert code == 0
    first = told.splitlines()[1]
    assert "Filled in by Hugging Face's Trainer" in first
    assert "train_batch_size, train_micro_batch_size_per_gpu 8, zero_optimization.reduce_bucket_size" in first
    assert "optimizer.params.lr 5e-05" in first
    assert row(told, "train_batch_size").startswith("8 samples a step")
    assert row(told, "optimizer").startswith("AdamW: lr 5e-05,")
    assert "warmup_max_lr 5e-05" in row(told, "scheduler")
    assert row(told, "gradient_clipping") == "1.0"


def test_the_rest_is_checked_beside_a_trainers_autos(check) -> None:
    params = {"warmup_num_steps": 500, "total_num_steps": "auto"}
    tree = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 3,
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    code, told = check(tree, "--world-size", "4")
    assert code == 0
    assert row(told, "train_batch_size") == "24 samples a step: 3 x 2 on each of 4 ranks"
    assert 'total_num_steps "auto"' in told
    assert tree["scheduler"]["params"] is params
    tree |= {"seed": "auto", "optimizer": {"type": "SGD", "params": {"momentum": "auto", "lr": "auto"}}, "fp61": 1}
    code, told = check(tree, "--world-size", "4")
    assert code == 1
    assert '"seed" cannot be "auto"' in told
    assert '"optimizer.params.momentum" is "auto", which is filled in' in told
    assert 'Did you mean "fp16"?' in told
    assert told.count("\n- ") == 3


@pytest.mark.programs
def test_no_compiler_is_imported(tmp_path: Path) -> None:
    """torch.compile's machinery takes longer than all else that the command does."""
    for number, tree in enumerate((BERT, {**BERT, "optimizer": {"type": "AdamW"}})):
        (tmp_path / f"{number}").write_text(json.dumps(tree))
    program = (
        "import sys; from thinwire.command_line import main\n"
        f"assert not main(['config', 'check', {str(tmp_path / '0')!r}, '--world-size', '8'])\n"
        f"assert not main(['config', 'check', {str(tmp_path / '1')!r}, '--world-size', '8'])\n"
        "print({'torch._dynamo', 'sympy', 'numba'} & sys.modules.keys(), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
