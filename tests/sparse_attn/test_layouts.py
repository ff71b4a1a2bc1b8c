"""Layouts: what each attends, what it must never attend, and what its parameters must be."""

import copy
import json
import pickle
import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusing import refused
from thinwire.sparse_attn.block_index import BlockIndex
from thinwire.sparse_attn.layouts.made import layout_from_config, layout_to_config
from thinwire.sparse_attn.layouts.named import (
    BigBird,
    BSLongformer,
    Custom,
    Dense,
    Fixed,
    Layout,
    LocalSlidingWindow,
    Variable,
)

DIRECTIONS = st.sampled_from(["bidirectional", "unidirectional"])

EVERY = [
    (Dense, {}),
    (Fixed, {"num_global_blocks": 2}),
    (Variable, {"num_random_blocks": 2, "local_window_blocks": [1, 3], "global_block_indices": [0, 4]}),
    (BigBird, {"num_random_blocks": 2}),
    (BSLongformer, {"global_block_indices": [1, 3]}),
    (LocalSlidingWindow, {}),
]


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Fixed(1), "####.# ####.# ####.# ####.# ...### ...###"),
        (Fixed(1, attention="unidirectional"), "#..... ##.... ###... ####.. ...##. ...###"),
        (Fixed(1, num_local_blocks=2, horizontal_global_attention=True), "##.# #### .### ####"),
        (
            Variable(1, local_window_blocks=[1, 2], global_block_indices=[4]),
            "#...#. .##.#. .##.#. ...##. ...##. ....##",
        ),
        (
            Variable(1, local_window_blocks=[1], global_block_indices=[0, 3], global_block_end_indices=[2, 9]),
            "##.# ##.# #### ##.#",
        ),
        (BigBird(1, num_random_blocks=0), "##### ###.. ####. #.### #..##"),
        (BigBird(1, num_random_blocks=0, attention="unidirectional"), "#.... ##... ###.. #.##. #..##"),
        (BSLongformer(1, global_block_indices=[2]), "###.. ###.. ##### ..### ..###"),
        (BSLongformer(1, global_block_indices=[0], global_block_end_indices=[2**62]), "### ### ###"),  # in no memory
        (LocalSlidingWindow(1), "#... ##.. .##. ..##"),
        (LocalSlidingWindow(1, attention="bidirectional"), "##.. ###. .### ..##"),
        (Custom(torch.ones(4, 4, dtype=torch.bool), attention="unidirectional"), "#... ##.. ###. ####"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_drawings(layout: Layout, rows: str) -> None:
    mask = layout.make_layout(len(rows.split()) * layout.block)[0]
    assert " ".join("".join(".#"[value] for value in row) for row in mask.tolist()) == rows


def test_fixed_patterns_of_heads() -> None:
    layout = Fixed(4, different_layout_per_head=True, num_different_global_patterns=4)
    for head in range(4):
        column = layout.make_layout(16 * 16)[head, :, 3 - head]
        assert column.all()
        assert layout.index(16 * 16).num_heads == 4


@pytest.mark.parametrize(("kind", "options"), EVERY, ids=lambda one: getattr(one, "__name__", ""))
@given(blocks=st.integers(3, 40), per_head=st.booleans())
@settings(max_examples=15, deadline=None)
def test_no_block_of_the_future(kind, options, blocks, per_head) -> None:
    layout = kind(2, attention="unidirectional", different_layout_per_head=per_head, **options)
    mask = layout.make_layout(16 * blocks)
    assert mask.shape == (2, blocks, blocks)
    assert not mask.triu(1).any()
    assert (mask.sum(-1) > 0).all()


@given(blocks=st.integers(3, 60), count=st.integers(0, 3), attention=DIRECTIONS)
@settings(max_examples=40, deadline=None)
def test_random_blocks_are_so_many_and_new(blocks, count, attention) -> None:
    without = BigBird(3, num_random_blocks=0, attention=attention).make_layout(16 * blocks)
    layout = BigBird(3, num_random_blocks=count, attention=attention, different_layout_per_head=True)
    added = layout.make_layout(16 * blocks) - without
    assert (added >= 0).all()
    reachable = torch.arange(1, blocks + 1) if attention == "unidirectional" else torch.full((blocks,), blocks)
    room = reachable - without[0].sum(-1)
    assert torch.equal(added.sum(-1), room.clamp(max=count).expand(3, -1))


def test_random_blocks_are_private_and_the_same_everywhere() -> None:
    layout = BigBird(4, num_random_blocks=2, different_layout_per_head=True, seed=3)
    random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    mine = layout.make_layout(640)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert zlib.crc32(mine.numpy().tobytes()) == 4210339277
    assert not torch.equal(mine[0], mine[1])
    assert not torch.equal(BigBird(4, num_random_blocks=2, seed=4).make_layout(640)[0], mine[0])


def test_layouts_of_one_length_do_not_collide() -> None:
    one, other = BigBird(2, num_random_blocks=0), BigBird(2, num_random_blocks=0, num_sliding_window_blocks=5)
    assert not torch.equal(one.make_layout(512), other.make_layout(512))
    assert one.index(512) is one.index(512)
    assert one.index(500).num_rows == one.index(512).num_rows
    for length in range(16 * 3, 16 * 60, 16):
        assert one.index(length).num_rows == length // 16


def test_a_layout_cannot_change_and_can_be_copied() -> None:
    layout = Variable(2, local_window_blocks=[1, 2])
    with pytest.raises(AttributeError):
        layout.block = 32
    assert layout == Variable(2, local_window_blocks=(1, 2))
    for same in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert same == layout
        assert torch.equal(same.make_layout(160), layout.make_layout(160))


def test_what_a_layout_keeps_serves_every_mode() -> None:
    layout = BigBird(2)
    with torch.inference_mode(), torch.device("meta"):
        index = layout.index(160)
    assert not index.columns.is_inference()
    assert index.columns.device.type == "cpu"
    assert len(pickle.dumps(layout)) == len(pickle.dumps(BigBird(2)))


MASK = torch.rand(3, 4, 6) > 0.5


def from_config(mode: str, **section) -> Layout:
    return layout_from_config({"mode": mode, **section}, 4)


def test_custom() -> None:
    layout = Custom(MASK, block=32)
    assert torch.equal(layout.index(4 * 32 - 5, 6 * 32).dense(), MASK)
    assert Custom(MASK[0], block=32).num_heads == 1
    assert layout != Custom(MASK, block=32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dense(0), "num_heads must be a whole number of at least 1"),
        (lambda: Fixed(2, block=0), "block must be one of 16, 32, 64, 128 tokens"),
        (lambda: BigBird(2, block=20), "block must be one of 16, 32, 64, 128 tokens.*got 20"),
        (lambda: Custom(torch.ones(3, 3, dtype=torch.bool), block=20), "block must be one of"),
        (lambda: BigBird(2, block=True), "block must be one of"),
        (lambda: BigBird(2, seed="x"), "seed must be a whole number, got 'x'"),
        (lambda: Dense(2, different_layout_per_head=[]), "different_layout_per_head must be True or False"),
        (lambda: Fixed(2, horizontal_global_attention=1), "horizontal_global_attention must be True or False"),
        (lambda: BSLongformer(2, global_block_indices=3), "global_block_indices must list whole numbers, got 3"),
        (lambda: BSLongformer(2, global_block_end_indices=["x"]), "global_block_end_indices must list whole"),
        (lambda: Fixed(2, num_local_blocks=4, num_global_blocks=3), "a multiple of num_global_blocks"),
        (lambda: Fixed(2, num_different_global_patterns=2), "different_layout_per_head=True"),
        (
            lambda: Fixed(2, different_layout_per_head=True, num_different_global_patterns=5),
            "room for 4 different global patterns",
        ),
        (lambda: Fixed(2, attention="both"), 'must be "bidirectional" or "unidirectional"'),
        (lambda: Fixed(2, attention="unidirectional", horizontal_global_attention=True), "bidirectional"),
        (lambda: Variable(2, local_window_blocks=[]), "local_window_blocks"),
        (lambda: Variable(2, local_window_blocks=[0, 2]), "local_window_blocks"),
        (lambda: Variable(2, local_window_blocks=4), "local_window_blocks must list sizes"),
        (lambda: Variable(2, local_window_blocks=[2.5]), "local_window_blocks must list sizes"),
        (lambda: Variable(2, global_block_indices=[0, 1], global_block_end_indices=[1]), "must pair"),
        (lambda: BSLongformer(2, global_block_indices=[3], global_block_end_indices=[3]), "ranges"),
        (lambda: BigBird(2, num_random_blocks=-1), "num_random_blocks"),
        (lambda: BigBird(2, num_sliding_window_blocks=9).index(8 * 16), "pad it to 144 tokens"),
        (lambda: BigBird(2, num_global_blocks=5).index(64), "num_global_blocks=5, but the sequence has 4 blocks"),
        (lambda: LocalSlidingWindow(2).index(17), "num_sliding_window_blocks=3"),
        (lambda: Custom(MASK, 32).index(160, 192), "4 x 6 blocks of 32, but 160 queries and 192 keys are 5 x 6"),
        (lambda: Custom(MASK.float()), "boolean"),
        (lambda: Custom(MASK, attention="unidirectional"), "as many rows as columns"),
        (lambda: layout_to_config(Custom(MASK)), "a Custom layout cannot be written"),
        (lambda: from_config("fixed", num_random_blocks=3), "not a parameter of mode"),
        (
            lambda: from_config("bigbird", num_random_block=2),
            '"sparse_attention.num_random_block".*Did you mean "num_random_blocks"',
        ),
        (lambda: from_config("bigbirds"), 'Did you mean "bigbird"'),
        (lambda: from_config("bigbird", num_global_blocks=-1), '"sparse_attention": num_global_blocks must be'),
        (lambda: BigBird(2).make_layout(100), "multiple of the block, 16 tokens, got 100"),
        (lambda: BigBird(2).index(160, 320), "Custom layout for cross-attention"),
        (lambda: BigBird(2, attention="unidirectional").index(160, 170), "as many queries as keys"),
    ],
)
def test_bad_input(make, message) -> None:
    refused(ValueError, message, make)


def test_a_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = BigBird(2, num_random_blocks=0).plot(160)
    assert "44.0%" in axes.get_title()
    assert axes.images[0].get_array().shape == (10, 10)


def test_a_section_of_a_configuration() -> None:
    section = {"mode": "bigbird", "block": 64, "num_random_blocks": 2, "attention": "unidirectional"}
    assert layout_from_config(section, 4) == BigBird(4, 64, num_random_blocks=2, attention="unidirectional")
    assert layout_from_config({}, 2) == Fixed(2)
    assert layout_from_config({"mode": "variable", "local_window_blocks": [4, 8]}, 2).local_window_blocks == (4, 8)
    of_all_modes = {"num_local_blocks": 4, "num_random_blocks": 0, "local_window_blocks": [4], "seed": 0}
    assert layout_from_config({"mode": "fixed", **of_all_modes, "global_block_end_indices": None}, 2) == Fixed(2)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_a_window_reaches_as_far_to_both_sides(width: int) -> None:
    rows, columns = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    near = (rows - columns).abs() <= width // 2
    both = LocalSlidingWindow(1, 16, num_sliding_window_blocks=width, attention="bidirectional").make_layout(9 * 16)
    lower = LocalSlidingWindow(1, 16, num_sliding_window_blocks=width).make_layout(9 * 16)
    assert torch.equal(both[0].bool(), near)
    assert torch.equal(lower[0].bool(), near & (columns <= rows))


@pytest.mark.parametrize(
    "layout",
    [
        Dense(3),
        Fixed(8, 32, True, num_local_blocks=8, num_different_global_patterns=4),
        Variable(2, local_window_blocks=(1, 5), global_block_indices=(2, 4), global_block_end_indices=(3, 9), seed=7),
        BigBird(4, 64, attention="unidirectional", num_random_blocks=2, seed=5),
        BSLongformer(4, global_block_indices=(1, 3)),
        LocalSlidingWindow(1, num_sliding_window_blocks=5, attention="bidirectional"),
    ],
    ids=lambda layout: type(layout).__name__,
)
def test_a_layout_comes_back_from_its_section(layout: Layout) -> None:
    section = json.loads(json.dumps(layout_to_config(layout)))
    assert layout_from_config(section, layout.num_heads) == layout


# The compact index: both directions say the same, in order, for any blocks


@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_both_directions_hold_the_mask(heads, rows, columns, density, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, rows, columns, generator=generator) < density
    pairs = [one.nonzero(as_tuple=True) for one in mask]
    shuffled = [(r.repeat(2), c.repeat(2)) for r, c in pairs]  # each twice: an index holds it once
    index = BlockIndex.from_pairs(16, rows, columns, shuffled)
    alike = all(torch.equal(one, mask[0]) for one in mask)
    assert index.num_heads == (1 if alike else heads)
    assert torch.equal(index.dense(), mask[: index.num_heads])
    assert index.density() == mask[: index.num_heads].float().mean()
    expected = mask[: index.num_heads].mT.nonzero()
    counts = index.column_offsets.diff().long()
    owners = torch.repeat_interleave(torch.arange(index.num_heads * columns), counts)
    assert torch.equal(torch.stack([owners // columns, owners % columns, index.rows.long()], 1), expected)
    assert {index.row_offsets.dtype, index.columns.dtype, index.column_offsets.dtype, index.rows.dtype} == {torch.int32}


def test_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    index = BlockIndex.from_pairs(16, 0, 0, [(nothing, nothing)])
    assert index.density() == 0
    assert index.dense().shape == (1, 0, 0)
