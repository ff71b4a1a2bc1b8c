"""Every command of the experiments names the option that cannot work, before anything runs or is written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

REFUSED = [
    ("benchmarks.frozen_step", "--rounds 0", "--rounds"),
    ("benchmarks.kernels", "--elements 1001", "--elements"),
    ("ethernet.__main__", "--hosts 1", "single rank"),
    ("ethernet.__main__", "--hosts 251", "at most 250"),
    ("ethernet.__main__", "--contenders onebit-adam", "ddp-bf16, ddp-fp32"),
    ("ethernet.__main__", "--rates 0", "at least 1"),
    ("ethernet.__main__", "--add --races losses", "--loss-rate of the race"),
    ("ethernet.__main__", "--retime 100 --races losses", "--contenders to time"),
    ("ethernet.__main__", "--retime 100 --contenders ddp-bf16", "--races losses"),
    ("ethernet.__main__", "--added-steps 100", "goes with --add"),
    ("ethernet.collectives", "--backends nccl", "invalid choice"),
    ("ethernet.local_steps", "--overlaps 1 15", "less than --every / --fragments, 15, got 15"),
    ("ethernet.unseen", "--probe-rate 500", "the plan would have seen it"),
    ("frontier.__main__", "--task images", "images"),
    ("frontier.__main__", "--task mini --contenders lamb", "lamb learns none of --task mini"),
    ("frontier.__main__", "--quick", "no measurement: give another folder"),
    ("layer_drop.__main__", "--sequence-length 7", "--sequence-length 7 must be at least 8"),
    ("layer_drop.__main__", "--higher-lr 0.1 0.1", "--higher-lr takes rates that differ"),
    ("layer_drop.__main__", "--corpus absent", "absent"),
    ("lion.__main__", "--methods lion", "experiments.lion: error: --methods must name adamw"),
    ("lion.__main__", "--methods adamw adamw", "something to compare"),
    ("long_documents.__main__", "--window 500", "--window 500 must divide --document-length 4096"),
    ("long_sequences.__main__", "--lengths 100", "--lengths must be multiples of 64, at least 256; got 100"),
    ("long_sequences.__main__", "--systems BigBird", "--systems must have BigBird, gather + SDPA, dense, SDPA"),
    ("pretrain_bert.__main__", "--optimizer sgd", "sgd"),
    ("pretrain_bert.__main__", "--lr nan", "above 0"),
    ("pretrain_bert.__main__", "--freeze-step soon", "'soon'"),
    ("pretrain_bert.__main__", "--steps 5 --warmup-steps 5", "--warmup-steps 5 must be less"),
    ("pretrain_bert.__main__", "--config absent.json", "absent.json cannot be read"),
    ("pretrain_bert.__main__", "--zero 3 --optimizer onebit-adam", "stage 3"),
    ("text_classification.__main__", "--methods adamw", "something to compare"),
    ("text_classification.__main__", "--corpus absent", "two text files"),
]


@pytest.mark.parametrize(("command", "given", "complaint"), REFUSED, ids=lambda one: one)
def test_what_cannot_work_is_refused(
    command: str, given: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = given.split()
    if "--quick" not in arguments:  # which asks for another folder than the published results'
        arguments += ["--output", str(tmp_path / "results")]
    assert import_module(f"experiments.{command}").main(arguments) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))
