"""The Triton kernels: in Triton's interpreter against the dense definition, and compiled for GPUs that are not here."""

from __future__ import annotations

import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

GROUPS = ("joined_and_split_blocks", "masks_and_dropout", "long_rows", "nothing_leaks")
KINDS = {
    "fp32": ("scale", "kept", "factor"),
    "*i32": ("items", "entries", "masks", "merges"),
    "*i64": ("seed",),
    "u32": ("threshold",),
    "*fp32": (
        *("lse", "delta", "key_bias", "bias", "d_bias"),
        *("part_out", "part_lse", "parts", "k_parts", "v_parts"),
    ),
    "*bf16": ("q", "k", "v", "out", "d_out", "d_q", "d_k", "d_v", "target"),
}
SHARED_MEMORY = 163 << 10  # bytes that a program may have on sm_80


@pytest.mark.parametrize("group", GROUPS)
def test_in_the_interpreter(group) -> None:
    command = [sys.executable, "-m", "tests.sparse_attn.kernels.triton_program", group]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kernel", ["forward", "merge", "queries", "keys", "add_parts"])
def test_compiles_for_sm_80(kernel) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from thinwire.sparse_attn.kernels.triton import backward_keys as triton_keys
    from thinwire.sparse_attn.kernels.triton import backward_queries as triton_queries
    from thinwire.sparse_attn.kernels.triton import forward as triton_forward
    from thinwire.sparse_attn.kernels.triton import gradients as triton_gradients

    modules = (triton_forward, triton_gradients, triton_keys, triton_queries)
    function = next(vars(one)[f"{kernel}_kernel"] for one in modules if f"{kernel}_kernel" in one.__all__)
    constants = {name: True for name in function.arg_names if name.isupper()}
    constants |= {name: value for name, value in {"T": 64, "WIDTH": 64, "BLOCK": 16}.items() if name in constants}
    kind_of = {name: kind for kind, names in KINDS.items() for name in names}
    signature = {name: "constexpr" if name in constants else kind_of.get(name, "i32") for name in function.arg_names}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    options = {"num_warps": 4, "num_stages": 2}
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY
