"""Benchmarks write what they say; peers do what kernels do; and the compiler makes short code of the CUDA kernels."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.benchmarks import (
    attention_gpu,
    codec_errors,
    elastic,
    encoder_rate,
    encoder_savings,
    engine,
    fast_encoder,
    frozen_step,
    inference,
    kernels,
)
from experiments.benchmarks.attention_gpu_case import Case, Result
from experiments.benchmarks.engine_step_time import BASELINE, REDUNDANCY
from experiments.benchmarks.kernel_code import ARCHITECTURES, BLOCK_SIZES, COUNTED, compile_kernels
from experiments.benchmarks.kernel_peers import (
    cpu_copies,
    cpu_fills,
    eager_decode_mean,
    eager_encode,
    eager_encode_as_deepspeed,
)
from experiments.benchmarks.machine_code import Compiler, Program, disassemble, find_tool, resources
from experiments.convergence import pipeline_codecs
from experiments.tasks.next_character import CharacterModelSize
from tests.compiled import compiled
from tests.experiments.helpers import write_text, written
from tests.launching import Jobs, free_port
from thinwire.compress.kernels.calls import Decode, Encode
from thinwire.compress.kernels.loading import execute
from thinwire.compress.packet_layout import HEADER_BYTES, packet_bytes

# Instructions an element on sm_90: half of what the kernels took that divided element by element.
LIMITS = {
    "decode_sign1": 18.5,
    "decode_mean_sign1": 29.5,
    "encode_sign1": 30,
    "decode_and_move_plain_sign1": 36,
    "average_and_encode_sign1": 50,
}


class Remarked(Exception):  # noqa: N818 - no error: what a compiler may do
    """Code that came with a log."""


class KeepingCompiler(Compiler):
    """Keeps code that came without a log: a minute of compiling, which unchanged sources need once."""

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """See Compiler."""
        compile_now = super().compile

        def compile_to(path: Path) -> None:
            code, log = compile_now(source, options)
            if log:
                raise Remarked(code, log)
            path.write_bytes(code)

        made_of = [one.encode() for one in (self.version, source, *options)]
        try:
            return compiled("kernels", made_of, compile_to, suffix=".cubin").read_bytes(), ""
        except Remarked as remarked:
            code, log = remarked.args
            return code, log


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    if not all(map(find_tool, ("cuobjdump", "nvdisasm"))):
        pytest.skip("cuobjdump and nvdisasm, of the CUDA toolkit or Triton, are not installed")
    try:
        return KeepingCompiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.kernels
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(compiler: Compiler, architecture: int) -> None:
    if architecture not in compiler.architectures:
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    programs: dict[str, Program] = {}
    for _, code in compile_kernels(compiler, architecture, BLOCK_SIZES[:1]):
        used = resources(code)
        assert used
        assert {name: taken for name, taken in used.items() if taken.spilled_bytes or taken.registers > 64} == {}
        if architecture == 90 and used.keys() & LIMITS.keys():
            programs |= disassemble(code)
    for name, limit in LIMITS.items() if architecture == 90 else ():
        counted = COUNTED[name]
        assert programs[name].fewest_issued(counted.stored, counted.loads, counted.fused) / counted.elements <= limit, (
            name
        )


def results(main: Callable[[Sequence[str]], int], tmp_path: Path, arguments: str) -> dict[str, Any]:
    """What a benchmark writes, into a folder that it makes."""
    output = tmp_path / "new" / "numbers.json"
    assert main([*arguments.split(), "--output", str(output)]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_kernels_write_numbers_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(kernels.main, tmp_path, "--elements 64K --repetitions 1")
    assert found["elements"] == 65536
    names = [result["name"] for result in found["results"]]
    assert {"copy, torch", "sign1 encode", "stat2 encode", "int4 decode", "int8 decode and average 4"} <= set(names)
    assert all(result["milliseconds"] > 0 for result in found["results"])
    assert "sign1 encode" in capsys.readouterr().out
    assert (tmp_path / "new" / "numbers.png").stat().st_size > 1000


def test_frozen_steps_write_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results(frozen_step.main, tmp_path, "--layers 1 --ranks 1 --rounds 1")
    assert found["elements"] == 263680
    names = {(result["name"], result["dtype"]) for result in found["results"]}
    wanted = {("1-bit Adam, frozen", "fp32"), ("1-bit Adam, stage 1, frozen", "bf16"), (frozen_step.NOTHING, "fp32")}
    assert wanted <= names
    assert all(result["milliseconds"] > 0 for result in found["results"])
    assert "1-bit Adam, frozen" in capsys.readouterr().out


def test_elastic_steps_write_numbers(tmp_path: Path) -> None:
    given = f"--ranks 2 --rounds 1 --model tiny --batch-size 1 --port {free_port()}"
    found = results(elastic.main, tmp_path, given)
    assert found["in frozen steps"] > 0
    assert {row for row, one in found["steps"].items() if one["median ratio"] > 0} == {"warmup", "frozen"}


def test_codec_errors_write_numbers(tmp_path: Path) -> None:
    found = results(codec_errors.main, tmp_path, "--steps 2")["results"]
    assert [(one["codec"], one["block_size"]) for one in found] == codec_errors.CONTENDERS
    for values in ("Gaussian", "outer gradient"):
        lost = {(one["codec"], one["block_size"]): one["lost"][values] for one in found}
        assert lost["sign1", 2048] > lost["stat2", 2048] > lost["int4", 2048] > lost["int4", 256] > lost["fp8", 2048]
    assert next(one for one in found if one["block_size"] == 256)["bits"] == 4.125


def test_pipeline_codecs_write_losses_and_keep_those_that_are_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline_codecs, "_SIZE", CharacterModelSize(layers=4, width=64, heads=2, length=16))
    monkeypatch.setattr(pipeline_codecs, "_CHARACTERS", 100_000)
    names = ["exact", "int4, int8", "int4 of 64 turned, int8"]
    for _ in range(2):
        output = tmp_path / "losses.json"
        options = ["--steps", "1", "--output", str(output), "--contenders", *names]
        assert pipeline_codecs.main(options) == 0
        runs = json.loads(output.read_text())["runs"]
        assert [(one["codecs"], one["stages"]) for one in runs] == [
            (names[0], 1),
            *((name, stages) for name in names[1:] for stages in (2, 4)),
        ]
        assert len({one["loss"] for one in runs}) == 5


ELEMENTS, BLOCK_SIZE = 6 * 2048, 2048


@pytest.mark.parametrize("eager", [eager_encode, eager_encode_as_deepspeed])
def test_eager_encode_does_what_the_kernel_does(eager: Callable[..., None]) -> None:
    payload, residual = torch.randn(2, ELEMENTS)
    lost = payload.clone()
    packet = torch.zeros(1, packet_bytes("sign1", ELEMENTS, BLOCK_SIZE), dtype=torch.uint8)
    execute(Encode("sign1", lost, residual, packet, ELEMENTS, BLOCK_SIZE))
    wanted, split = packet[0, HEADER_BYTES:], 4 * ELEMENTS // BLOCK_SIZE
    found = torch.zeros_like(wanted)
    eager(payload, residual, found, BLOCK_SIZE)
    torch.testing.assert_close(found[:split].view(torch.float32), wanted[:split].clone().view(torch.float32))
    assert torch.equal(found[split:], wanted[split:])
    torch.testing.assert_close(payload if eager is eager_encode else residual, lost)


def test_eager_mean_does_what_the_kernel_does() -> None:
    packets = torch.zeros(3, packet_bytes("sign1", ELEMENTS, BLOCK_SIZE), dtype=torch.uint8)
    for row in packets.unbind():
        execute(Encode("sign1", torch.randn(ELEMENTS), None, row.unsqueeze(0), ELEMENTS, BLOCK_SIZE))
    wanted, output = torch.empty(2, ELEMENTS)
    execute(Decode("sign1", packets, wanted, ELEMENTS, BLOCK_SIZE, mean=True))
    eager_decode_mean(packets[:, HEADER_BYTES:], output, BLOCK_SIZE)
    torch.testing.assert_close(output, wanted)


def test_every_copy_copies_and_every_fill_fills() -> None:
    source, target = torch.randn(2, ELEMENTS)
    copies, fills = cpu_copies(source, target), cpu_fills(target)
    assert list(copies) == ["copy, torch", "copy, numpy", "copy, streaming"]
    assert list(fills) == ["fill, torch", "fill, streaming"]
    for work, wanted in [(one, source) for one in copies.values()] + [
        (one, torch.ones(ELEMENTS)) for one in fills.values()
    ]:
        target.zero_()
        work()
        assert torch.equal(target, wanted)


def test_ratios() -> None:
    times = {"thinwire": 2.0, "FlexAttention, compiled": 3.0, "dense, flash": 20.0}
    results = [Result(name, "forward", 4096, 128, 64, 0.25, time) for name, time in times.items()]
    results.append(Result("thinwire", "training", 4096, 64, 64, 0.25, 4.0))
    whole, alone = attention_gpu.summarise(results)
    assert (whole["times_faster_than_flex"], whole["times_faster_than_dense"]) == (1.5, 10.0)
    assert whole["of_one_over_density"] == 2.5
    assert (alone["mode"], alone["times_faster_than_flex"], alone["of_one_over_density"]) == ("training", None, None)


@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [
        ("import os; os.abort()", 60, "exit code -6"),
        ("raise RuntimeError('illegal memory access')", 60, "RuntimeError: illegal memory access"),
        ("print('no figures')", 60, "it printed no figures"),
        (
            'import time; print(\'{"results": [], "left_out"\', end="", flush=True); time.sleep(60)',
            0.5,
            "no time was left",
        ),
        ("pass", -1, "no time was left"),
    ],
)
def test_a_crash_loses_one_case_and_says_why(program: str, seconds: float, why: str) -> None:
    found, (missing,) = attention_gpu.run_case([sys.executable, "-c", program], Case(4096, 64, 128, 1), seconds)
    assert found == []
    assert why in missing["why"]
    assert (missing["length"], missing["block"], missing["head_size"]) == (4096, 64, 128)


def test_ratios_pair_rounds() -> None:
    summary = engine.summarise({BASELINE: [100.0, 400.0, 200.0], "other": [150.0, 600.0, 300.0]})
    assert summary[BASELINE].milliseconds[1] == 200
    assert summary["other"].ratio_to_ddp == (1.5, 1.5, 1.5)
    low, middle, high = summary["other"].milliseconds
    assert low < middle == 300 < high


@pytest.mark.programs
def test_the_engine_writes_numbers_and_picture(tmp_path: Path, jobs: Jobs) -> None:
    sizes = ["--model", "tiny", "--batch-size", "2", "--rounds", "1", "--memory-ranks", "1"]
    ended = jobs.alone("-m", "experiments.benchmarks.engine", *sizes, "--output", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    found = written(tmp_path, "bench_engine")
    times = found["step_time"]["milliseconds"]
    assert {BASELINE, REDUNDANCY, "stage 2, fused AdamW, overlap_comm", "stage 1, 1-bit Adam, frozen"} <= times.keys()
    assert all(len(rounds) == 1 and min(rounds) > 0 for rounds in times.values())
    systems = found["memory"]["systems"]
    assert list(systems) == [*(f"stage {n}, AdamW" for n in range(4)), *(f"stage {n}, 1-bit Adam" for n in (1, 2))]
    for one in systems.values():
        assert one["held"] == pytest.approx(one["formula"], rel=0.15)  # shards of whole blocks weigh in a tiny model
    assert "1-bit Adam, frozen" in ended.stdout


def test_answers_in_8_bits_are_compared(tmp_path: Path) -> None:
    corpus = [str(write_text(tmp_path / f"{name}.txt", 400)) for name in ("one", "other")]
    given = ["--size", "tiny", "--steps", "1", "--rounds", "1", "--sentences", "4", "--requests", "3"]
    output = tmp_path / "found.json"
    assert inference.main([*given, "--corpus", *corpus, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert [row["accuracy"] for row in found["encoder"]["systems"]] == [pytest.approx(0.5, abs=0.5)] * 2
    assert found["encoder"]["latency"]["p50_milliseconds"] <= found["encoder"]["latency"]["p99_milliseconds"]
    assert [row["batch"] for row in found["decoder"]] == [1, 8]
    assert all(0 < row["same_greedy_tokens"] <= 1 < 100 * row["speed"] for row in found["decoder"])


ENCODERS = {
    "fast_encoder": (
        fast_encoder,
        "--sizes tiny --batch-size 3 --rounds 1 --vocab-size 80 --without compiled,_sorted",
        2,
    ),
    "encoder_savings": (
        encoder_savings,
        "--size tiny --length 64 --block 16 --batch-size 2 --rounds 1 --vocab-size 80",
        8,
    ),
    "encoder_rate": (encoder_rate, "--size tiny --length 16 --batch-size 2 --rounds 1", None),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.programs
def test_encoders_are_compared(name: str, tmp_path: Path) -> None:
    command, options, systems = ENCODERS[name]
    given = [one.replace("_", " ") for one in options.split()]
    corpus = write_text(tmp_path / "shopping.txt", 400)
    given += ["--corpus", str(corpus)] if systems else []
    assert command.main([*given, "--output", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    if systems:
        assert len(found["results"]) == systems
        assert found["results"][0]["speed"] == 1.0
        if name == "fast_encoder":
            one, other = (row["first_loss"] for row in found["results"])
            assert one == pytest.approx(other, rel=0.1), "dropout differs"
    else:
        assert found["flops"] > 0
        assert sum(found["time"].values()) == pytest.approx(1)
