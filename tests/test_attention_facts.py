"""What multi-head attention is, held against the code: splitting, joining, counting, sharing."""

import itertools

import numpy as np
import pytest
import torch
from conftest import KINDS, NORMS, POSITIONS, tiny_config, tiny_model, tokens

from model import GPT, Attention, GPTConfig, KVCache, as_mha, attend, estimate_n_params, kv_cache_bytes

GPT2 = GPTConfig(vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, norm="pre")


def random_attention(seed: int = 0, **changes) -> Attention:
    """One layer of attention with weights that make its heads look at different tokens."""
    layer = Attention(tiny_config(**changes), 0).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return layer


def parts(layer: Attention) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The layer's projections as float64 (weight (C, out), bias (out,)) for q, k, v and the output."""
    c = layer.config
    sizes = [c.n_head * c.head_dim, c.n_kv_head * c.head_dim, c.n_kv_head * c.head_dim]
    weights = layer.c_attn.weight.detach().double().split(sizes)
    biases = layer.c_attn.bias.detach().double().split(sizes)
    found = {name: (w.numpy().T, b.numpy()) for name, w, b in zip("qkv", weights, biases, strict=True)}
    found["o"] = (
        layer.c_proj.weight.detach().double().numpy().T,
        layer.c_proj.bias.detach().double().numpy(),
    )
    return found


def plain_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One head, one token after the other: q, k, v (T, D) -> output (T, D), weights (T, T)."""
    T, D = q.shape
    weights = np.zeros((T, T))
    for t in range(T):
        scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / np.sqrt(D)
        e = np.exp(scores - scores.max())
        weights[t, : t + 1] = e / e.sum()
    return weights @ v, weights


def loop_over_heads(layer: Attention, x: np.ndarray) -> np.ndarray:
    """The layer's result for x (T, C), in NumPy: cut the columns, run the heads in turn, join, mix."""
    c, p = layer.config, parts(layer)
    q, k, v = (x @ p[name][0] + p[name][1] for name in "qkv")
    D, group, heads = c.head_dim, c.n_head // c.n_kv_head, []
    for h in range(c.n_head):
        own, shared = slice(h * D, (h + 1) * D), slice(h // group * D, (h // group + 1) * D)
        heads.append(plain_attention(q[:, own], k[:, shared], v[:, shared])[0])
    return np.concatenate(heads, axis=1) @ p["o"][0] + p["o"][1]


@pytest.mark.parametrize(("attention", "n_kv_head"), [("mha", None), ("gqa", 2), ("gqa", 4), ("mqa", None)])
def test_numpy_loop_over_heads_equals_the_layer(attention, n_kv_head):
    layer = random_attention(attention=attention, n_kv_head=n_kv_head)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        got = layer(x, None, None, None)
    for row in range(2):
        np.testing.assert_allclose(
            got[row].numpy(), loop_over_heads(layer, x[row].double().numpy()), atol=1e-5
        )


@pytest.mark.parametrize("attention", KINDS)
def test_heads_one_by_one_and_joined_equal_all_at_once(attention):
    c = tiny_config(attention=attention)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(3, c.n_head, 7, c.head_dim, generator=generator)
    k, v = (torch.randn(3, c.n_kv_head, 7, c.head_dim, generator=generator) for _ in "kv")
    group = c.n_head // c.n_kv_head
    one_by_one = [
        attend(q[:, h : h + 1], k[:, h // group : h // group + 1], v[:, h // group : h // group + 1])
        for h in range(c.n_head)
    ]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), attend(q, k, v), atol=1e-6, rtol=0)


def test_each_head_of_the_layer_by_itself_adds_up_to_the_layer():
    # joining and mixing is a sum over heads: each head's output through its own rows of the output matrix
    layer = random_attention()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(3))
    weight, bias = layer.c_proj.weight.detach().clone(), layer.c_proj.bias.detach()
    with torch.no_grad():
        whole, total = layer(x, None, None, None), bias.clone()
        for h in range(4):
            layer.c_proj.weight.zero_()
            layer.c_proj.weight[:, h * 8 : (h + 1) * 8] = weight[:, h * 8 : (h + 1) * 8]
            total = total + layer(x, None, None, None) - bias
    torch.testing.assert_close(total, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", KINDS)
def test_one_head_is_plain_attention(attention):
    layer = random_attention(n_head=1, attention=attention)
    x = np.random.default_rng(0).normal(size=(6, 32))
    p = parts(layer)
    head = plain_attention(*(x @ p[name][0] + p[name][1] for name in "qkv"))[0]
    with torch.no_grad():
        got = layer(torch.from_numpy(x).float()[None], None, None, None)[0]
    np.testing.assert_allclose(got.numpy(), head @ p["o"][0] + p["o"][1], atol=1e-5)


def test_worked_example_of_5_tokens_2_heads_and_3_dims():
    layer = random_attention(n_embd=6, n_head=2, bias=False)
    assert layer.config.head_dim == 3
    x = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        q, k, v = layer.c_attn(x)[0].split(6, dim=1)
        assert q.shape == k.shape == v.shape == (5, 6)
        q2, k2, v2 = (t.view(5, 2, 3).transpose(0, 1) for t in (q, k, v))
        assert q2.shape == (2, 5, 3)
        for h in range(2):  # no arithmetic: head 0 is the first three columns, head 1 the last three
            assert torch.equal(q2[h], q[:, 3 * h : 3 * h + 3])
        scores = (q2 @ k2.transpose(1, 2) / 3**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        weights = scores.softmax(dim=-1)
        assert scores.shape == weights.shape == (2, 5, 5)
        assert torch.allclose(weights.sum(-1), torch.ones(2, 5)) and torch.all(weights.triu(1) == 0)
        assert torch.all(weights[:, 0, 0] == 1)  # the first token sees only itself
        assert (weights[0] - weights[1]).abs().max() > 0.05  # two heads, two patterns
        context = weights @ v2
        assert context.shape == (2, 5, 3)
        joined = context.transpose(0, 1).reshape(5, 6)
        output = layer.c_proj(joined)
        assert joined.shape == output.shape == (5, 6)
        torch.testing.assert_close(layer(x, None, None, None)[0], output, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("width", "n_head"), [(32, h) for h in (1, 2, 4, 8, 16, 32)] + [(512, 8), (768, 12)])
def test_attention_has_four_square_matrices_whatever_the_number_of_heads(width, n_head):
    c = tiny_config(n_embd=width, n_head=n_head, bias=False)
    with torch.device("meta"):
        layer = Attention(c, 0)
    assert sum(p.numel() for p in layer.parameters()) == 4 * width**2
    assert estimate_n_params(c)["attention"] == c.n_layer * 4 * width**2


def test_gpt2_small_in_numbers():
    with torch.device("meta"):  # shapes without memory
        model = GPT(GPT2)
    layer = model.transformer["h"][0].attn
    weights, biases = (
        sum(p.numel() for n, p in layer.named_parameters() if n.endswith(end)) for end in ("weight", "bias")
    )
    assert (weights, biases) == (2_359_296, 3_072) == (4 * 768**2, 4 * 768)
    attention = sum(p.numel() for block in model.transformer["h"] for p in block.attn.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert attention == 12 * (2_359_296 + 3_072) == 28_348_416 and round(attention / 1e6, 1) == 28.3
    assert total == 124_439_808 and 0.22 < attention / total < 0.25
    assert (estimate_n_params(GPT2)["total"], estimate_n_params(GPT2)["attention"]) == (total, attention)


def test_widths_of_a_head():
    assert GPT2.head_dim == 64 and GPT2.n_embd == 12 * 64
    original = GPTConfig(n_head=8, n_embd=512)  # the 2017 model
    assert original.head_dim == 64 and 8 * original.head_dim == 512


@torch.no_grad()
def share_kv_heads(mha: GPT, n_groups: int) -> None:
    """Make the KV heads of each group copies of its first one."""
    c = mha.config
    C, D, group = c.n_embd, c.head_dim, c.n_head // n_groups
    for block in mha.transformer["h"]:
        for p in block.attn.c_attn.parameters():
            for start, head in itertools.product((C, 2 * C), range(c.n_head)):
                first = head // group * group
                p[start + head * D : start + (head + 1) * D] = p[
                    start + first * D : start + (first + 1) * D
                ].clone()


@torch.no_grad()
def drop_copies(mha: GPT, small: GPT) -> GPT:
    """Load an MHA model into a smaller kind, with the first KV head of each group."""
    c, Hkv = mha.config, small.config.n_kv_head
    C, D, state = c.n_embd, c.head_dim, {}
    firsts = [h * (c.n_head // Hkv) for h in range(Hkv)]
    for name, p in mha.state_dict().items():
        if ".attn.c_attn." in name:
            kv = (p[start + h * D : start + (h + 1) * D] for start in (C, 2 * C) for h in firsts)
            p = torch.cat((p[:C], *kv))
        state[name] = p
    small.load_state_dict(state)
    return small


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize(("attention", "n_groups"), [("gqa", 2), ("mqa", 1)])
def test_shared_kv_heads_equal_the_mha_they_are_copies_in_ATT_6(attention, n_groups, norm, position):
    mha = tiny_model(norm=norm, position=position)
    idx = tokens(2, 20)
    with torch.no_grad():
        free = mha(idx)[0]
        share_kv_heads(mha, n_groups)
        shared = mha(idx)[0]
        assert (free - shared).abs().max() > 0.1  # the copies matter
        small = drop_copies(
            mha,
            tiny_model(
                9,
                attention=attention,
                norm=norm,
                position=position,
                n_kv_head=n_groups if attention == "gqa" else None,
            ),
        )
        torch.testing.assert_close(small(idx)[0], shared, atol=1e-4, rtol=0)


def test_as_many_groups_as_heads_is_mha_exactly_ATT_6():
    idx = tokens(2, 20)
    with torch.no_grad():
        assert torch.equal(
            tiny_model(attention="gqa", n_kv_head=4)(idx)[0], tiny_model(attention="mha")(idx)[0]
        )
        assert torch.equal(
            tiny_model(attention="gqa", n_kv_head=1)(idx)[0], tiny_model(attention="mqa")(idx)[0]
        )


@pytest.mark.parametrize(
    ("n_kv_head", "T", "S"), [(1, 6, 6), (2, 6, 6), (3, 6, 6), (2, 1, 6), (3, 1, 6), (6, 1, 6)]
)
def test_query_head_h_reads_kv_head_h_over_group(n_kv_head, T, S):
    # every value of KV head i is i, so a query head's output tells which one it read
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, heads, n, 4, generator=generator) for heads, n in ((6, T), (n_kv_head, S)))
    v = torch.arange(n_kv_head).float().view(1, n_kv_head, 1, 1).expand(1, n_kv_head, S, 4)
    read = attend(q, k, v)[0, :, 0, 0].round().int().tolist()
    assert read == [h // (6 // n_kv_head) for h in range(6)]


def test_cache_bytes_of_mha_gqa_and_mqa():
    sizes = {}
    for attention, n_kv_head in (("mha", 12), ("gqa", 2), ("mqa", 1)):
        c = GPTConfig(
            vocab_size=61,
            block_size=64,
            n_layer=3,
            n_head=12,
            n_embd=96,
            attention=attention,
            n_kv_head=n_kv_head,
        )
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            cache = KVCache(c, 5, 40, dtype)
            by_hand = (
                2 * 3 * 5 * n_kv_head * 40 * 8 * size
            )  # k and v, layers, rows, heads, tokens, width, bytes
            assert (
                cache.nbytes == cache.k.nbytes + cache.v.nbytes == kv_cache_bytes(c, 40, dtype, 5) == by_hand
            )
        sizes[attention] = cache.nbytes
        assert kv_cache_bytes(as_mha(c), 40, dtype, 5) == sizes["mha"]
    assert sizes["mqa"] * 12 == sizes["mha"] and sizes["gqa"] * 6 == sizes["mha"]
