"""DeepSpeed's names and calling forms: layouts by their arguments, packed products, modules, and its utilities."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.refusing import refused
from tests.sparse_attn.cases import relative_error
from thinwire.deepspeed.ops import sparse_attention as theirs
from thinwire.deepspeed.ops.sparse_attention import BertSparseSelfAttention, MatMul, Softmax, SparseAttentionUtils
from thinwire.deepspeed.ops.sparse_attention import SparseSelfAttention as SelfAttention
from thinwire.sparse_attn import Custom, Dense, LocalSlidingWindow, layout_to_config, pack_blocks, reference_attention


class Diagonal(theirs.SparsityConfig):
    """A user's own layout: the diagonal, and the first column."""

    def make_layout(self, seq_len: int) -> Tensor:
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            layout[head].fill_diagonal_(1)
            layout[head, :, 0] = 1
        return self.check_and_propagate_first_head_layout(layout)


def test_layouts_take_deepspeeds_arguments() -> None:
    made = [
        theirs.DenseSparsityConfig(4, 16, True),
        theirs.FixedSparsityConfig(4, 16, True, 4, 1, "bidirectional", True, 2),
        theirs.VariableSparsityConfig(4, 16, False, 1, [2, 4], [0], None, "bidirectional", True),
        theirs.BigBirdSparsityConfig(4, 16, False, 1, 3, 1, "unidirectional"),
        theirs.BSLongformerSparsityConfig(4, 16, False, 3, [0, 2], None, "bidirectional"),
        theirs.LocalSlidingWindowSparsityConfig(4, 16, 5, "bidirectional"),
        Diagonal(4, 16),
    ]
    for config in made:
        layout = config.make_layout(128)
        assert layout.dtype == torch.int64
        assert layout.shape == (4, 8, 8)
        assert set(layout.unique().tolist()) <= {0, 1}
    window = LocalSlidingWindow(4, 16, num_sliding_window_blocks=5, attention="bidirectional")
    assert torch.equal(made[5].make_layout(128), window.make_layout(128))
    assert layout_to_config(made[5])["mode"] == "local"
    refused(ValueError, "120 tokens, expected a multiple of the block of 16", Diagonal(4).make_layout, 120)
    refused(NotImplementedError, "SparsityConfig has no make_layout", theirs.SparsityConfig(4).make_layout, 128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_matmul_and_softmax_make_attention(dtype: torch.dtype) -> None:
    layout = theirs.BigBirdSparsityConfig(2, 16, True).make_layout(96)
    q, k, v = (torch.randn(3, 2, 96, 8, dtype=dtype) for _ in range(3))
    attends = (torch.rand(96, 96) < 0.8).to(dtype)
    padding = torch.zeros(3, 96, dtype=dtype)
    padding[:, -5:] = -torch.inf
    scores = MatMul(layout, 16, "sdd", trans_b=True)(q, k)
    assert scores.shape == (3, int(layout.sum()), 16, 16)
    before = scores.clone()
    kept = Softmax(layout, 16)(scores, 8**-0.5, None, padding, attends, "add", "mul")
    assert kept.data_ptr() == scores.data_ptr()
    assert not torch.equal(before, scores)
    out = MatMul(layout, 16, "dsd")(kept, v)
    assert out.dtype == dtype
    expected = reference_attention(
        *(one.double() for one in (q, k, v)),
        Custom(layout.bool(), 16),
        key_padding_mask=padding == 0,
        attn_mask=attends.bool(),
    )
    assert relative_error(out, expected) < (1e-6 if dtype == torch.float32 else 2e-3)
    turned = MatMul(layout, 16, "dds", trans_b=True)(v.mT, kept)
    assert relative_error(turned.mT, expected) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_leading_sizes_of_one_may_be_left_out() -> None:
    layout = torch.tensor([[1, 0], [1, 1]])
    a, b = torch.randn(32, 5), torch.randn(5, 32)
    scores = MatMul(layout, 16, "sdd")(a, b)
    assert scores.shape == (3, 16, 16)
    assert torch.equal(scores, pack_blocks((a @ b)[None, None], Custom(layout.bool(), 16))[0])
    assert MatMul(layout, 16, "dsd")(scores, torch.randn(1, 32, 4)).shape == (1, 32, 4)


def test_layers_refuse_what_is_no_layout() -> None:
    refused(ValueError, "mode is 'ssd'", MatMul, torch.ones(1, 2, 2), 16, "ssd")
    refused(ValueError, r"expected a layout tensor of 0 and 1, .* got \[2\]", Softmax, torch.ones(2), 16)
    refused(ValueError, "block must be one of 16", MatMul, torch.ones(1, 2, 2), 8, "sdd")
    with pytest.raises(ValueError, match="attn_mask_mode is 'or'"):
        Softmax(torch.ones(1, 2, 2), 16)(torch.ones(1, 4, 16, 16), attn_mask_mode="or")  # type: ignore[arg-type]
    refused(TypeError, "expected a layout, or a sparsity configuration", SelfAttention, torch.ones(2, 2))


def test_self_attention_over_a_users_own_layout() -> None:
    q, k, v = (torch.randn(2, 4, 80, 8) for _ in range(3))
    config = Diagonal(4, 16)
    layer = SelfAttention(config, max_seq_length=96)
    expected = reference_attention(q, k, v, Custom(config.make_layout(80).bool(), 16))
    assert relative_error(layer(q, k, v), expected) < 1e-6
    assert torch.equal(layer(q, k.mT, v), layer(q, k, v))  # a key that is turned already
    assert "MadeLayout(num_heads=4, block=16)" in repr(layer)


def test_a_saved_master_layout_is_taken() -> None:
    q, k, v = (torch.randn(2, 4, 64, 8) for _ in range(3))
    saved = (torch.rand(4, 8, 8) < 0.5).long()
    saved[:, :, 0] = 1
    layer = nn.ModuleDict({"attention": SelfAttention(theirs.BigBirdSparsityConfig(4))})
    layer.load_state_dict({"attention.master_layout": saved})
    expected = reference_attention(q, k, v, Custom(saved[:, :4, :4].bool(), 16))
    assert relative_error(layer["attention"](q, k, v), expected) < 1e-6
    with pytest.raises(ValueError, match="the saved layout is for 128 tokens, got 144"):
        layer["attention"](*torch.randn(3, 1, 4, 144, 8))
    assert not layer.state_dict()


def test_berts_self_attention() -> None:
    config = SimpleNamespace(hidden_size=16, num_attention_heads=2)
    layer = BertSparseSelfAttention(config, theirs.DenseSparsityConfig(2))
    hidden, padding = torch.randn(3, 50, 16), torch.zeros(3, 1, 1, 50)
    padding[..., 40:] = -10000.0
    q, k, v = (one(hidden).view(3, 50, 2, 8).transpose(1, 2) for one in (layer.query, layer.key, layer.value))
    expected = reference_attention(q, k, v, Dense(2), key_padding_mask=padding[:, 0, 0]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(hidden, padding), expected)
    assert sorted(layer.state_dict()) == sorted(
        f"{name}.{kind}" for name in ("query", "key", "value") for kind in ("weight", "bias")
    )
    with pytest.raises(ValueError, match="hidden_size is 17, expected a multiple of the 2"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=17, num_attention_heads=2), Dense(2))


class OwnLayer(nn.Module):
    """As DeepSpeed's BERT has it: attention.self(hidden, mask) returns a tensor."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.self = BertSparseSelfAttention(config, Dense(2))


def test_replacing_layers_of_ones_own() -> None:
    config = SimpleNamespace(hidden_size=16, num_attention_heads=2)
    layers = nn.ModuleList([OwnLayer(config) for _ in range(2)]).eval()
    projection = layers[1].attention.self.query
    layout = theirs.LocalSlidingWindowSparsityConfig(2, 16, 1, "bidirectional")
    replace = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer
    assert replace(config, layers, layout) is layers
    sparse = layers[1].attention.self
    assert sparse.query is projection
    assert not sparse.training
    hidden = torch.randn(1, 48, 16)
    changed = hidden.clone()
    changed[:, :16] += 1
    assert torch.equal(sparse(hidden)[:, 16:], sparse(changed)[:, 16:])
    refused(TypeError, "Linear has no self-attention", replace, config, [*layers, nn.Linear(2, 2)], Dense(2))
    refused(ValueError, "the layout is for 3 heads, expected 2", replace, config, layers, Dense(3))


def test_padding_ids_and_embeddings_together() -> None:
    ids, embeds, table = torch.ones(2, 10, dtype=torch.int64), torch.randn(2, 10, 4), nn.Embedding(7, 4)
    pad, *padded = SparseAttentionUtils.pad_to_block_size(16, ids, torch.ones_like(ids), ids, None, embeds, 3, table)
    new_ids, new_mask, new_types, positions, new_embeds = padded
    assert (pad, positions) == (6, None)
    for one, filled in ((new_ids, 3), (new_mask, 0), (new_types, 0), (new_embeds, table.weight[3])):
        assert torch.equal(one[:, 10:], torch.as_tensor(filled).expand_as(one[:, 10:]))
    assert torch.equal(SparseAttentionUtils.unpad_sequence_output(pad, new_embeds), embeds)
    alone = SparseAttentionUtils.pad_to_block_size(16, ids, torch.ones_like(ids), ids, None, None, 3, None)
    assert (alone[0], alone[-1]) == (6, None)
