"""How a model is cut, and when its fragments leave."""

from __future__ import annotations

import itertools

import pytest

from thinwire.optim.diloco.fragments import Timetable, auto_fragments, cut_fragments, layers_of

BERT = ["embeddings.word.weight", *(f"encoder.layer.{n}.{one}" for n in range(5) for one in ("w", "b")), "head.weight"]


def test_layers_are_the_entries_of_the_largest_numbered_list() -> None:
    assert layers_of(BERT) == [[1 + 2 * n, 2 + 2 * n] for n in range(5)]
    assert layers_of(["a", "b.weight"]) == []
    assert layers_of(["0.weight", "0.bias", "2.weight"]) == [[0, 1], [2]]


def test_layers_are_strided_and_the_rest_fills_up() -> None:
    numels = {0: 1000, **dict.fromkeys(range(1, 11), 50), 11: 13}
    fragments = cut_fragments(BERT, numels, 2)
    sizes = [one.numel for one in fragments]
    assert sum(sizes) == sum(numels.values())
    assert abs(sizes[0] - sizes[1]) <= 1
    assert {piece.parameter for piece in fragments[0].pieces} >= {1, 2, 5, 6, 9, 10}
    assert {piece.parameter for piece in fragments[1].pieces} >= {3, 4, 7, 8}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_element_is_in_one_fragment_once(count: int) -> None:
    numels = {0: 777, **{number: 10 * number + 3 for number in range(1, 11)}, 11: 1}
    fragments = cut_fragments(BERT, numels, count)
    places = sorted(
        (piece.parameter, element)
        for one in fragments
        for piece in one.pieces
        for element in range(piece.start, piece.start + piece.numel)
    )
    assert places == [(number, element) for number, numel in numels.items() for element in range(numel)]
    for one in fragments:
        ends = [0, *itertools.accumulate(piece.numel for piece in one.pieces)]
        assert [piece.offset for piece in one.pieces] == ends[:-1]


def test_frozen_layers_are_none() -> None:
    with pytest.raises(ValueError, match="fragments=3 for 2 layers"):
        cut_fragments(BERT, {1: 4, 3: 4, 11: 9}, 3)


def test_auto_is_a_fragment_for_three_layers() -> None:
    assert auto_fragments([f"h.{number}.w" for number in range(24)]) == 8
    assert auto_fragments(BERT) == 1
    assert auto_fragments(["weight"]) == 1


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (30, 1), (30, 3), (7, 3), (2, 5), (100, 8)])
def test_each_fragment_leaves_once_in_every_interval(every: int, fragments: int) -> None:
    table = Timetable(every, 0, fragments)
    left = [(step, one) for step in range(1, 5 * every + 1) for one in table.leaving(step)]
    for fragment in range(fragments):
        steps = [step for step, one in left if one == fragment]
        assert len(steps) == 5
        assert {later - earlier for earlier, later in itertools.pairwise(steps)} <= {every}
    assert (every, fragments - 1) in left
