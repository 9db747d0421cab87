"""Decoding at the speed of memory: each path of attention, 8-bit caches and weights, compiling, formats."""

import contextlib
import copy
import io
import json

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from conftest import KINDS, NORMS, POSITIONS, in_chunks, tiny_config, tiny_model, tokens
from torch import Tensor

import device
import generation
import sample
from checkpoint import save_checkpoint
from data.tokenizer import char_tokenizer
from device import cpu_has_bfloat16, matrix_vector_products
from generation import Sampling, decode, generate, prefill
from model import (
    GPT,
    GPTConfig,
    KVCache,
    attend,
    attend_to_cache,
    attention_mask,
    estimate_decode_bytes_per_token,
    kv_cache_bytes,
    matmul_params,
)  # fmt: skip
from quantize import FEW_ROWS, Int8Linear, quantize_weights

CPU = torch.device("cpu")
FP32, BF16, FP16, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.int8
NORM_BOUND = {FP32: 1e-5, BF16: 1e-2, FP16: 2e-3}  # relative errors; a rounding is 2**-9 and 2**-12
B, S, LAYER = 3, 9, 1  # rows, tokens in sight, and a layer that isn't the first
TOKENIZER = char_tokenizer(["".join(map(chr, range(32, 92)))])  # 60 characters and the end-of-text id
GREEDY = Sampling(temperature=0)
every_kind = pytest.mark.parametrize("attention", KINDS)


def relative(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def untied(seed: int = 0, **changes) -> GPT:
    """A tiny model that speaks the tokenizer's ids, and does not just repeat its last token."""
    return tiny_model(seed, vocab_size=TOKENIZER.vocab_size, tie_weights=False, **changes)


# --- every path of attention, against a loop over heads


def loop_over_heads(q: Tensor, k: Tensor, v: Tensor, pad: list[int]) -> Tensor:
    """The T newest of S tokens attend, row by row, head by head, query by query, in float64.

    A query sees the keys up to its own one, without its row's padding; a query that is padding sees itself.
    """
    q, k, v = q.double(), k.double(), v.double()
    rows, H, T, D = q.shape
    out = torch.zeros_like(q)
    for b in range(rows):
        for h in range(H):
            kv = h // (H // k.shape[1])
            for t in range(T):
                own = k.shape[2] - T + t
                seen = [s for s in range(own + 1) if s >= pad[b] or s == own]
                weights = torch.stack([q[b, h, t] @ k[b, kv, s] / D**0.5 for s in seen]).softmax(0)
                out[b, h, t] = sum(w * v[b, kv, s] for w, s in zip(weights, seen, strict=True))
    return out


def cache_with(attention: str, T: int, dtype: torch.dtype, q_dtype: torch.dtype, pad: list[int] | None):
    """A cache of S tokens of which T are new, their queries, and the mask: what a layer has in its hands."""
    c = tiny_config(attention=attention, n_head=6, n_embd=48)
    cache = KVCache(c, B, S + 2, dtype, pad=None if pad is None else torch.tensor(pad))
    k, v = (random(B, c.n_kv_head, S, c.head_dim, seed=seed).to(q_dtype) for seed in (1, 2))
    cache.append(LAYER, k[:, :, : S - T], v[:, :, : S - T])
    cache.length = S - T
    cache.append(LAYER, k[:, :, S - T :], v[:, :, S - T :])
    # queries arrive as a transposed view of (B, T, H, D)
    q = 2 * random(B, T, c.n_head, c.head_dim, seed=3).to(q_dtype).transpose(1, 2)
    return q, cache, attention_mask(T, cache, CPU)


FORMATS = [  # of queries and cache
    (FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, INT8),
    (BF16, INT8), (FP32, BF16), (FP32, FP16), (BF16, FP32),
]  # fmt: skip


@every_kind
@pytest.mark.parametrize("T", [1, 3, S])
@pytest.mark.parametrize("pad", [None, [0, 2, 8]], ids=["full", "padded"])
@pytest.mark.parametrize(("q_dtype", "cache_dtype"), FORMATS, ids=lambda d: str(d).removeprefix("torch."))
def test_attention_to_a_cache_equals_a_loop_over_heads_PRF_8(attention, T, pad, q_dtype, cache_dtype):
    q, cache, mask = cache_with(attention, T, cache_dtype, q_dtype, pad)
    assert (mask is None) == (pad is None and T in (1, S))  # causal by itself, no mask at all, or spelled out
    got = attend_to_cache(q, cache, LAYER, mask)
    expected = loop_over_heads(q, *cache.read(LAYER, S, FP32), pad or [0] * B)
    assert got.shape == q.shape and got.dtype == q_dtype and torch.isfinite(got).all()
    assert relative(got, expected) < NORM_BOUND[q_dtype]
    if q_dtype == FP32:
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


@every_kind
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [3, 3, 3], [5, 1, 3]], ids=str)
def test_chunks_through_a_cache_equal_a_loop_over_heads(attention, dtype, chunks):
    c = tiny_config(attention=attention, n_head=6, n_embd=48)
    cache = KVCache(c, B, S, dtype)
    q = random(B, c.n_head, S, c.head_dim, seed=3).to(dtype)
    k, v = (random(B, c.n_kv_head, S, c.head_dim, seed=seed).to(dtype) for seed in (1, 2))
    pieces = []
    for T in chunks:
        new = slice(cache.length, cache.length + T)
        cache.append(LAYER, k[:, :, new], v[:, :, new])
        pieces.append(attend_to_cache(q[:, :, new], cache, LAYER, attention_mask(T, cache, CPU)))
        cache.length += T
    assert relative(torch.cat(pieces, dim=2), loop_over_heads(q, k, v, [0] * B)) < NORM_BOUND[dtype]


@pytest.mark.parametrize("n_kv_head", [1, 2, 6])
@pytest.mark.parametrize(("T", "masked"), [(1, False), (1, True), (3, True), (S, True)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_folding_equals_repeating_the_heads_and_the_stock_flag_PRF_8(n_kv_head, T, masked, dtype):
    q = random(2, 6, T, 8).to(dtype)
    k, v = (random(2, n_kv_head, S, 8, seed=seed).to(dtype) for seed in (1, 2))
    mask = torch.ones(T, S).tril(S - T).bool()[None, None] if masked else None
    folded = attend(q, k, v, mask)
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    wide = (t.repeat_interleave(6 // n_kv_head, dim=1) for t in (k, v))
    repeated = F.scaled_dot_product_attention(q, *wide, attn_mask=mask)
    for other in (stock, repeated):
        assert relative(folded, other) < NORM_BOUND[dtype]


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Each call of the kernel: shapes of the queries and the keys, format, and where the keys lie."""
    found = []
    kernel = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        found.append((tuple(q.shape), tuple(k.shape), q.dtype, k.data_ptr(), options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return found


def taken(calls: list[tuple], *args) -> list[tuple]:
    q, cache, mask = cache_with(*args)
    calls.clear()
    attend_to_cache(q, cache, LAYER, mask)
    return [(q_shape, k_shape, dtype) for q_shape, k_shape, dtype, _, _ in calls]


@pytest.mark.parametrize("pad", [None, [0, 2, 8]], ids=["full", "padded"])
def test_which_path_is_taken_PRF_8(pad, calls):
    for dtype in (BF16, FP16):  # one query per KV head: a row of the cache at a time, in fp32
        assert taken(calls, "mha", 1, dtype, dtype, pad) == [((1, 6, 1, 8), (1, 6, S, 8), FP32)] * B
        # a group shares its keys: all rows at once, as they are, and folded
        assert taken(calls, "gqa", 1, dtype, dtype, pad) == [((B, 3, 2, 8), (B, 3, S, 8), dtype)]
        assert taken(calls, "mqa", 1, dtype, dtype, pad) == [((B, 1, 6, 8), (B, 1, S, 8), dtype)]
        assert taken(calls, "mha", 3, dtype, dtype, pad) == [((B, 6, 3, 8), (B, 6, S, 8), dtype)]
        assert taken(calls, "mqa", 3, dtype, dtype, pad) == [((B, 1, 18, 8), (B, 1, S, 8), dtype)]
    assert taken(calls, "mha", 1, FP32, FP32, pad) == [((B, 6, 1, 8), (B, 6, S, 8), FP32)]
    for T in (1, 3):  # int8 can't be read as it is: row by row for any kind
        assert taken(calls, "mha", T, INT8, BF16, pad) == [((1, 6, T, 8), (1, 6, S, 8), FP32)] * B
        assert taken(calls, "gqa", T, INT8, FP32, pad) == [((1, 3, 2 * T, 8), (1, 3, S, 8), FP32)] * B
        assert taken(calls, "mqa", T, INT8, BF16, pad) == [((1, 1, 6 * T, 8), (1, 1, S, 8), FP32)] * B


@pytest.mark.parametrize("dtype", [FP32, BF16, INT8], ids=str)
def test_a_whole_sequence_is_one_causal_call(dtype, calls):
    for attention, n_kv_head in (("mha", 6), ("gqa", 3), ("mqa", 1)):
        q_dtype = BF16 if dtype == INT8 else dtype
        assert taken(calls, attention, S, dtype, q_dtype, None) == [
            ((B, 6, S, 8), (B, n_kv_head, S, 8), q_dtype)
        ]
        options = calls[0][4]
        assert options["is_causal"] and options["enable_gqa"] == (n_kv_head != 6)


@pytest.mark.parametrize("T", [1, 3])
def test_a_group_reads_the_cache_where_it_lies(T, calls):
    q, cache, mask = cache_with("gqa", T, BF16, BF16, None)
    attend_to_cache(q, cache, LAYER, mask)
    assert [at for _, _, _, at, _ in calls] == [cache.k[LAYER].data_ptr()]  # no copy, no head more


def test_a_row_by_row_buffer_has_the_size_of_one_row():
    q, cache, mask = cache_with("mha", 1, BF16, BF16, None)
    attend_to_cache(q, cache, LAYER, mask)
    buffer = cache._row
    attend_to_cache(q, cache, LAYER, mask)
    assert cache._row is buffer and buffer.shape == (2, 1, 6, S + 2, 8)  # not a cache of its own


def test_a_compiled_step_has_one_path_for_all_batches(monkeypatch, calls):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert taken(calls, "mha", 1, BF16, BF16, None) == [((B, 6, 1, 8), (B, 6, S, 8), BF16)]
    assert taken(calls, "gqa", 1, INT8, FP32, None) == [((B, 3, 2, 8), (B, 3, S, 8), FP32)]


# --- a cache in int8


def magnitudes(n: int, D: int) -> Tensor:
    """(1, 2, n, D) numbers whose vectors range from 1e-6 to 1e6."""
    return random(1, 2, n, D) * 10 ** torch.linspace(-6, 6, n)[:, None]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_int8_is_off_by_half_a_step_at_most(dtype):
    x = magnitudes(200, 16).to(dtype)
    x = x.clamp(-6e4, 6e4) if dtype == FP16 else x
    cache = KVCache(tiny_config(attention="gqa", n_head=4, n_embd=64), 1, 200, INT8)
    cache.append(LAYER, x, -3 * x.float())
    k, v = cache.read(LAYER, 200, FP32)
    step_k, step_v = cache.scales[:, LAYER].float()
    # The step is kept in fp16: rounded down, 127 of it fall short of the largest number, by less than half a
    # step. Below fp16's normal range, 6e-5, a step is only known to be within 2**-25, 127 of it accordingly.
    for got, exact, step in ((k, x.float(), step_k), (v, -3 * x.float(), step_v)):
        assert torch.all((got - exact).abs() <= step / 2 * (1 + 1e-5) + 127 * 2.0**-25)
        largest = exact.abs().amax(dim=-1, keepdim=True)
        assert torch.all(step <= (largest / 127 * (1 + 2.0**-11)).clamp(min=1e-6) + 2.0**-25)
    normal = (step_k > 6.2e-5).expand_as(x)
    assert normal.float().mean() > 0.5
    assert torch.all((k - x.float()).abs()[normal] <= (step_k / 2 * (1 + 1e-5)).expand_as(x)[normal])


def test_int8_keeps_zeros_and_survives_the_extremes():
    cache = KVCache(tiny_config(attention="mqa"), 1, 6, INT8)
    x = torch.zeros(1, 1, 6, 8)
    x[0, 0, 1] = 1e-30
    x[0, 0, 2] = torch.linspace(-4e-6, 4e-6, 8)
    x[0, 0, 3] = 8e6
    x[0, 0, 4, ::2], x[0, 0, 4, 1::2] = 1e30, -1e30
    x[0, 0, 5, 3] = -5.0
    cache.append(0, x, torch.zeros_like(x))
    k, v = cache.read(0, 6, FP32)
    assert torch.all(v == 0) and torch.all(k[0, 0, :2] == 0)
    assert (k - x)[0, 0, 2].abs().max() < 6e-7  # the smallest step is 1e-6
    assert torch.allclose(k[0, 0, 3], x[0, 0, 3], rtol=1e-3)
    assert torch.isfinite(k).all() and torch.equal(k[0, 0, 4].sign(), x[0, 0, 4].sign())  # saturates
    assert k[0, 0, 5].tolist() == pytest.approx([0, 0, 0, -5, 0, 0, 0, 0], abs=5 * 2**-11)
    assert torch.isfinite(cache.scales).all() and cache.k.min() >= -127
    assert torch.all(cache.scales[:, 0] > 0)  # also of zeros: nothing is divided by 0


@every_kind
def test_int8_bytes(attention):
    for D, bound in ((8, 1.0), (64, 0.53), (128, 0.53)):
        c = GPTConfig(vocab_size=61, block_size=64, n_layer=3, n_head=4, n_embd=4 * D, attention=attention)
        cache, half = KVCache(c, 5, 40, INT8), KVCache(c, 5, 40, BF16)
        by_hand = 2 * 3 * 5 * c.n_kv_head * 40 * (D + 2)  # a byte per number, two for each vector's step
        assert cache.nbytes == kv_cache_bytes(c, 40, INT8, 5) == by_hand
        assert cache.nbytes == cache.k.nbytes + cache.v.nbytes + cache.scales.nbytes
        assert cache.nbytes / half.nbytes <= bound
        read = estimate_decode_bytes_per_token(c, 40, 5, BF16, INT8)
        assert read == 2 * matmul_params(c) + by_hand


@pytest.mark.parametrize("dtype", [BF16, INT8], ids=str)
def test_repeat_and_keep_carry_all_of_a_row(dtype):
    c = tiny_config(attention="gqa")
    cache = KVCache(c, 3, 6, dtype, pad=torch.tensor([0, 2, 1]))
    scale = torch.tensor([1.0, 10.0, 100.0])[:, None, None, None]  # another row's steps would be far off
    for layer in range(c.n_layer):
        k, v = (scale * random(3, 2, 4, 8, seed=seed) for seed in (layer, layer + 9))
        cache.append(layer, k, v)
    cache.length = 4
    before = [cache.read(layer, 4, FP32) for layer in range(c.n_layer)]
    twin = cache.repeat(2)
    assert (twin.length, twin.max_len, twin.nbytes) == (4, 6, 2 * cache.nbytes) and cache.k.shape[1] == 3
    twin.keep([5, 0, 2])
    rows = [2, 0, 1]
    assert twin.pad.tolist() == [1, 0, 2] and twin.nbytes == cache.nbytes
    for layer, (k, v) in enumerate(before):
        for got, expected in zip(twin.read(layer, 4, FP32), (k[rows], v[rows]), strict=True):
            assert torch.equal(got, expected)
        for at, row in enumerate(rows):
            one = twin.row(layer, at, 4)
            assert torch.equal(one[0][0], k[row]) and torch.equal(one[1][0], v[row])


INT8_LOGITS = 0.015  # relative error that an int8 cache may cost these models; 0.4 to 0.8 % were measured


@every_kind
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_scores_with_an_int8_cache(attention, position, norm):
    model, idx = untied(attention=attention, position=position, norm=norm), tokens(3, 24)
    with torch.inference_mode():
        exact = model(idx)[0]

    def scores(*chunks: int) -> Tensor:
        return in_chunks(model, idx, list(chunks), KVCache(model.config, 3, 24, INT8))

    once = scores(24)
    assert 1e-4 < relative(once, exact) < INT8_LOGITS
    assert (once.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
    for chunks in ([1] * 24, [9, *[1] * 10, 5], [8, 8, 8]):  # the same 8 bits, whatever the pieces
        assert relative(scores(*chunks), once) < 1e-3
    bf16 = in_chunks(model.bfloat16(), idx, [9, *[1] * 10, 5], KVCache(model.config, 3, 24, INT8))
    assert relative(bf16, exact) < INT8_LOGITS + 0.05  # bfloat16's own error on top


@every_kind
@pytest.mark.parametrize("position", POSITIONS)
def test_text_with_an_int8_cache_through_and_past_the_end_of_the_context(attention, position):
    model = untied(attention=attention, position=position)
    prompts = [[5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11]]

    def run(cache_dtype: torch.dtype | None, prompts: list[list[int]], n: int = 90):
        return generate(
            model, TOKENIZER, prompts, max_new_tokens=n, sampling=GREEDY, context_end="refill",
            cache_dtype=cache_dtype,
        )  # fmt: skip

    g = run(INT8, prompts)
    assert g.token_ids == [run(INT8, [prompt]).token_ids[0] for prompt in prompts]  # 8 bits of its own
    assert g.refills > 0 and max(map(len, g.token_ids)) == 90
    assert g.cache_bytes_allocated == kv_cache_bytes(model.config, 32, INT8, 3)
    # token by token, each is one of the best by the exact scores of what was in sight
    ids = g.token_ids[1][:20]
    with torch.inference_mode():
        exact = model(torch.tensor([prompts[1] + ids]))[0][0, len(prompts[1]) - 1 : -1]
    short = exact.amax(-1) - exact[range(len(ids)), ids]
    assert torch.all(short <= 0.1 * exact.std(-1))


# --- weights in int8


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 40), (64, 61), (24, 8), (33, 7)])
def test_a_layer_in_int8(dtype, bias, n_in, n_out):  # 24 and 33 are not for the kernel
    torch.manual_seed(0)
    layer = nn.Linear(n_in, n_out, bias=bias)
    with torch.no_grad():
        layer.weight.mul_(10 ** torch.linspace(-2, 2, n_out)[:, None])
        layer.weight[-1] = 0
    layer = layer.to(dtype)
    small = Int8Linear(layer)
    assert small.weight.dtype == INT8 and small.scale.shape == (n_out,) and not list(small.parameters())
    step = small.scale.float()[:, None]
    back = small.weight.float() * step
    assert torch.all((back - layer.weight.float()).abs() <= step / 2 * (1 + 1e-5))
    assert torch.all(back[-1] == 0)
    assert torch.all(small.weight[:-1].abs().amax(dim=1) >= 126)  # all of the range is used, row by row
    exact = nn.Linear(n_in, n_out, bias=bias)
    exact.load_state_dict({name: t.float() for name, t in layer.state_dict().items()})
    for shape in ((1,), (FEW_ROWS,), (FEW_ROWS + 1,), (2, 1), (3, 7)):
        x = random(*shape, n_in).to(dtype)
        with torch.inference_mode():
            got, float_layer, rounded = small(x), exact(x.float()), F.linear(x.float(), back, exact.bias)
        assert got.shape == (*shape, n_out) and got.dtype == dtype
        arithmetic = 2 * NORM_BOUND[dtype]  # of the product, and of the weights turned back
        assert relative(got, rounded) < arithmetic
        # and each weight is off by half a step at most
        most = step[:, 0] / 2 * x.float().abs().sum(-1, keepdim=True) + arithmetic * rounded.abs().amax()
        assert torch.all((got.float() - float_layer).abs() <= most)
        assert n_out < 40 or relative(got, float_layer) < 0.02 + arithmetic


def test_few_rows_go_through_the_kernel_many_do_not(monkeypatch):
    kernel, used = torch._weight_int8pack_mm, []
    monkeypatch.setattr(
        torch, "_weight_int8pack_mm", lambda x, w, s: used.append((len(x), w.dtype)) or kernel(x, w, s)
    )
    layer = Int8Linear(nn.Linear(32, 8).bfloat16())
    for shape in ((1, 1), (FEW_ROWS, 1), (FEW_ROWS + 1, 1), (1, 50)):
        layer(random(*shape, 32).bfloat16())
    assert used == [(1, INT8), (FEW_ROWS, INT8)]  # 8 bits are all that it reads
    Int8Linear(nn.Linear(32, 8))(random(1, 32))
    Int8Linear(nn.Linear(24, 8).bfloat16())(random(1, 24).bfloat16())  # would read past the end
    assert len(used) == 2


@every_kind
@pytest.mark.parametrize("tie_weights", [True, False])
def test_quantize_weights_takes_every_linear_layer(attention, tie_weights):
    model = tiny_model(attention=attention, tie_weights=tie_weights)
    embedding = model.transformer["wte"].weight.detach().clone()
    assert quantize_weights(model) is model
    kinds = [type(module) for module in model.modules()]
    assert nn.Linear not in kinds and kinds.count(Int8Linear) == 2 * 4 + 1  # four in each block, the output
    assert torch.equal(model.transformer["wte"].weight, embedding) and model.dtype == FP32
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert sum(layer.weight.nbytes for layer in layers) == matmul_params(model.config)  # a byte per weight
    read = sum(t.nbytes for layer in layers for t in (layer.weight, layer.scale))
    assert read < 0.6 * 2 * matmul_params(model.config)  # beside bfloat16's two, for these narrow layers
    plain = tiny_model(attention=attention, tie_weights=tie_weights)
    with torch.inference_mode():
        got, exact = model(tokens(3, 12))[0], plain(tokens(3, 12))[0]
    assert 1e-4 < relative(got, exact) < 0.03


@pytest.fixture(scope="module")
def trained() -> GPT:
    """A tiny model that has learned a sentence."""
    torch.manual_seed(0)
    shape = tiny_config(vocab_size=TOKENIZER.vocab_size, attention="gqa", norm="pre", position="rope")
    model = GPT(shape, torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(250):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 250)
        x = sentence_windows(8)
        loss = model(x[:, :-1], x[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def sentence_windows(n: int) -> Tensor:
    text = "THE CAT SAT ON THE MAT AND THE DOG SAT ON THE CAT, BUT THE MAT WAS NOT AMUSED. "
    ids = TOKENIZER.encode(3 * text)
    return torch.stack([torch.tensor(ids[at : at + 25]) for at in torch.randint(len(ids) - 25, (n,))])


def test_int8_weights_cost_little_loss_on_a_trained_model(trained):
    torch.manual_seed(1)
    x, prompt, loss = sentence_windows(64), TOKENIZER.encode("THE CAT SAT "), {}
    with torch.inference_mode():
        for name, dtype, change in (
            ("fp32", FP32, nn.Identity()), ("bf16", BF16, nn.Identity()),
            ("fp32 int8", FP32, quantize_weights), ("bf16 int8", BF16, quantize_weights),
        ):  # fmt: skip
            model = change(copy.deepcopy(trained).to(dtype))
            loss[name] = model(x[:, :-1], x[:, 1:])[1].item()
            g = generate(model, TOKENIZER, [prompt], max_new_tokens=12, sampling=GREEDY)
            assert g.texts == ["ON THE MAT A"]
    assert loss["fp32"] < 0.3  # it has learned
    assert abs(loss["fp32 int8"] - loss["fp32"]) < 0.01 and abs(loss["bf16 int8"] - loss["bf16"]) < 0.01


# --- torch.compile of the decode step


class Counted:
    """A backend for torch.compile that runs the graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize(
    ("attention", "dtype", "cache_dtype"),
    [("mha", FP32, None), ("gqa", FP32, None), ("mqa", FP32, None), ("mha", BF16, None), ("gqa", FP32, INT8)],
    ids=str,
)
def test_one_compilation_serves_all_lengths_KVC_14_PRF_1(attention, dtype, cache_dtype, monkeypatch):
    torch._dynamo.reset()
    model, backend = untied(attention=attention, position="rope").to(dtype), Counted()
    decoder = torch.compile(model, dynamic=True, backend=backend)  # as sample.py does
    counts, warm = [], []
    warm_up = generation.warm_up
    monkeypatch.setattr(generation, "warm_up", lambda *args: (warm_up(*args), warm.append(backend.graphs)))
    for prompt in ([5, 7], [1, 2, 3, 4, 5, 6, 7, 8], [9]):
        options = {"max_new_tokens": 23, "sampling": GREEDY, "cache_dtype": cache_dtype}
        g = generate(model, TOKENIZER, [prompt], decoder=decoder, **options)
        counts.append(backend.graphs)
        if dtype == FP32:
            assert g.token_ids == generate(model, TOKENIZER, [prompt], **options).token_ids
    assert 1 <= counts[0] <= 2 and counts == [counts[0]] * 3  # none for prompts of other lengths
    assert warm[0] == counts[0]  # all of it before the clock runs
    torch._dynamo.reset()


@pytest.mark.parametrize("cache_dtype", [None, INT8], ids=str)
def test_a_batch_adds_one_compilation_and_no_text_changes_KVC_14_PRF_1(cache_dtype, monkeypatch):
    torch._dynamo.reset()
    model, backend = untied(attention="gqa", position="rope"), Counted()
    decoder = torch.compile(model, dynamic=True, backend=backend)
    counts, warm = [], []
    warm_up = generation.warm_up
    monkeypatch.setattr(generation, "warm_up", lambda *args: (warm_up(*args), warm.append(backend.graphs)))
    for rows in (1, 3, 2, 4):
        options = {"max_new_tokens": 30, "seed": 1, "cache_dtype": cache_dtype}
        got = generate(model, TOKENIZER, [[5, 7]] * rows, decoder=decoder, **options)
        assert got.token_ids == generate(model, TOKENIZER, [[5, 7]] * rows, **options).token_ids
        counts.append(backend.graphs)
    assert counts[0] <= 2 and counts[-1] <= 2 * counts[0]  # PyTorch compiles for 1 and for any other number
    assert warm[::2] == counts  # all of it before the clock runs
    torch._dynamo.reset()


# --- products with one row

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN to switch off"
)


@needs_onednn
def test_matrix_vector_products_restore_what_they_switch():
    def enabled() -> bool:
        return torch.backends.mkldnn.enabled

    assert enabled()
    with matrix_vector_products(CPU, BF16):
        assert not enabled()
        with matrix_vector_products(CPU, BF16):
            assert not enabled()
        assert not enabled()
    assert enabled()
    with pytest.raises(ZeroDivisionError), matrix_vector_products(CPU, BF16):
        _ = 1 / 0
    assert enabled()
    for name, dtype in (("cpu", FP32), ("cpu", FP16), ("cuda", BF16), ("mps", BF16)):
        with matrix_vector_products(torch.device(name), dtype):
            assert enabled()
    torch.backends.mkldnn.enabled = False  # a user's own choice stays
    try:
        with matrix_vector_products(CPU, BF16):
            assert not enabled()
        assert not enabled()
    finally:
        torch.backends.mkldnn.enabled = True


@needs_onednn
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_only_a_single_row_is_decoded_that_way(dtype):
    model, seen = untied().to(dtype), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.mkldnn.enabled))
    for rows in (1, 2):
        cache = KVCache(model.config, rows, 9, dtype)
        with torch.inference_mode():
            prefill(model, tokens(rows, 5), cache)
            decode(model, torch.zeros(rows, dtype=torch.long), cache)
    assert seen == [True, dtype == FP32, True, True] and torch.backends.mkldnn.enabled


@every_kind
def test_a_single_row_has_the_same_scores_that_way(attention):
    model, idx = untied(attention=attention).bfloat16(), tokens(1, 6)
    caches = [KVCache(model.config, 1, 6, BF16) for _ in range(2)]
    with torch.inference_mode():
        for cache in caches:
            prefill(model, idx[:, :5], cache)
        got = decode(model, idx[:, 5], caches[0])
        plain = model(idx[:, 5:], cache=caches[1])[0][:, 0]
    assert relative(got, plain) < 0.02 and caches[0].length == caches[1].length == 6


# --- formats, chosen and reported by sample.py


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A run of an untrained tiny model."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return str(save_checkpoint(folder, 1, untied(attention="gqa"), TOKENIZER.to_dict(), {}).parents[1])


def sampled(run: str, *options: str) -> tuple[dict, str]:
    """The report of one call, and what it told people."""
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        common = ["--prompt=THE CAT", "--max_new_tokens=12", "--device=cpu", "--temperature=0"]
        report = sample.main([f"--out_dir={run}", *common, *options])
    return report, told.getvalue()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("limit", [0, 10**12])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_dtype_auto_is_bfloat16_for_a_large_model_on_a_processor_that_has_it_PRF_9(
    fast, limit, dtype, run, monkeypatch
):
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: fast)
    monkeypatch.setattr(device, "LARGE_MODEL_BYTES", limit)
    large = limit == 0
    expected = ("bfloat16" if fast and large else "float32") if dtype == "auto" else dtype
    report, told = sampled(run, f"--dtype={dtype}")
    assert report["dtype"] == report["cache_dtype"] == expected and report["weights"] == "plain"
    assert f"machine    cpu, {expected}, weights plain, cache in {expected}, " in told
    # as it comes, without a word about it
    assert sampled(run)[0]["dtype"] == ("bfloat16" if fast and large else "float32")


def test_large_is_64_MiB_of_float32(run, monkeypatch):
    assert device.LARGE_MODEL_BYTES == 64 * 2**20
    asked = []
    monkeypatch.setattr(device, "cpu_has_bfloat16", lambda: asked.append(1) or True)
    assert sampled(run)[0]["dtype"] == "float32" and not asked  # a tiny model isn't large


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, False), ({"avx512_bf16": False, "amx_bf16": False, "avx512_f": True}, False),
        ({"avx512_bf16": True}, True), ({"amx_bf16": True, "avx512_bf16": False}, True),
    ],
)  # fmt: skip
def test_cpu_has_bfloat16_asks_pytorch(found, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert cpu_has_bfloat16() is expected


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["auto", "float32", "bfloat16", "float16", "int8"])
def test_formats_of_weights_and_cache_are_reported_KVC_10(weights, dtype, cache_dtype, run, tmp_path):
    path = tmp_path / "report.json"
    report, told = sampled(
        run, f"--weights={weights}", f"--dtype={dtype}", f"--cache_dtype={cache_dtype}", f"--report={path}",
        "--num_samples=2",
    )  # fmt: skip
    cache = dtype if cache_dtype == "auto" else cache_dtype
    assert (report["dtype"], report["cache_dtype"], report["weights"]) == (dtype, cache, weights)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["dtype"], written["cache_dtype"], written["weights"]) == (dtype, cache, weights)
    assert f"{dtype}, weights {weights}, cache in {cache}" in told
    n_bytes = 2 * 2 * 2 * 2 * (7 + 12) * {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8 + 2}[cache]
    assert report["kv_cache_bytes_allocated"] == report["kv_cache_bytes_formula"] == n_bytes
    assert report["kv_cache_bytes_mha"] == 2 * n_bytes
    plain = sampled(run, "--dtype=float32")[0]
    assert report["texts"][0][:1] == plain["texts"][0][:1]  # the first choice is clear enough for any format


def test_sample_compiles_the_decode_step_once_KVC_14(run, monkeypatch):
    torch._dynamo.reset()
    backend, asked, compile_ = Counted(), [], torch.compile

    def spy(model: GPT, **options):
        asked.append(options)
        return compile_(model, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", spy)
    plain = sampled(run)[0]
    assert not asked  # off unless asked for
    assert sampled(run, "--compile")[0]["texts"] == plain["texts"]
    assert asked == [{"dynamic": True}] and backend.graphs == 1
    torch._dynamo.reset()


# --- prompts that are too long for a small context


@pytest.mark.parametrize("kv_cache", [True, False])
def test_a_prompt_beyond_the_context_is_refused_or_cut_with_a_count_KVC_9(kv_cache, monkeypatch):
    model, prompt = untied(block_size=64), [i % 60 for i in range(200)]
    ran = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    for rule in ("error", "stop"):
        for prompts in ([prompt], [[1, 2], prompt]):  # the second is found before the first is read
            with pytest.raises(ValueError, match=r"the prompt has 200 tokens and the context block_size=64"):
                generate(model, TOKENIZER, prompts, max_new_tokens=8, context_end=rule, kv_cache=kv_cache)
    assert not ran
    g = generate(
        model, TOKENIZER, [prompt], max_new_tokens=8, context_end="refill", kv_cache=kv_cache, sampling=GREEDY
    )
    assert g.prompt_tokens == 32 and g.refills == 0  # what was read of it: the last half context
    cut = generate(model, TOKENIZER, [prompt[-32:]], max_new_tokens=8, sampling=GREEDY)
    assert g.token_ids == cut.token_ids and len(g.token_ids[0]) == 8
