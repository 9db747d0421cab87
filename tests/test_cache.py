"""The KV cache: generating with it must be the same as running the whole text again, only cheaper."""

import gc

import pytest
import torch
from conftest import KINDS, POSITIONS, SHAPES, SHAPES_QK, in_chunks, shape_id, tiny_config, tiny_model, tokens
from torch import Tensor

from model import GPT, GPTConfig, KVCache, attend, attention_mask, kv_cache_bytes

CHUNKS = ([12], [1] * 12, [5, 7], [3, 3, 3, 3], [5, 1, 6], [4, 2, 1, 5])
every_shape = pytest.mark.parametrize("shape", SHAPES_QK, ids=shape_id)


def uncached(model: GPT, idx: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(idx)[0]


def same(got: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


# --- the same numbers


@every_shape
def test_cached_equals_uncached_in_chunks_of_any_size_KVC_2(shape):
    model, idx = tiny_model(**shape), tokens(3, 12)
    expected = uncached(model, idx)
    for chunks in CHUNKS:
        same(in_chunks(model, idx, chunks), expected)
    same(
        in_chunks(model, idx, [12], KVCache(model.config, 3, 32)), expected
    )  # a cache that is larger than needed


@every_shape
def test_every_split_of_a_sequence_gives_equal_logits_ATT_1(shape):
    model, idx = tiny_model(**shape), tokens(1, 8)
    expected = uncached(model, idx)
    for first in range(1, 8):  # prefill, then all the rest at once: the mask must not start at the first key
        same(in_chunks(model, idx, [first, 8 - first]), expected)
    same(in_chunks(model, idx[:, :6], [5, 1]), expected[:, :6])
    same(in_chunks(model, idx[:, :6], [4, 2]), expected[:, :6])


@every_shape
def test_a_prompt_with_a_cache_does_not_see_its_future_ATT_2(shape):
    model, idx = tiny_model(**shape), tokens(1, 10)
    for chunks in ([10], [4, 6], [9, 1]):
        changed = idx.clone()
        changed[0, -1] = (idx[0, -1] + 1) % 61
        before, after = in_chunks(model, idx, chunks), in_chunks(model, changed, chunks)
        assert torch.equal(before[:, :-1], after[:, :-1]) and not torch.equal(before[:, -1], after[:, -1])


@torch.inference_mode()
def greedy(model: GPT, prompt: Tensor, n: int, use_cache: bool) -> Tensor:
    """The n likeliest tokens after `prompt` (B, T), one after the other: (B, n)."""
    idx = prompt
    cache = KVCache(model.config, prompt.shape[0], prompt.shape[1] + n) if use_cache else None
    for step in range(n):
        new = idx[:, -1:] if use_cache and step else idx
        idx = torch.cat((idx, model(new, cache=cache, logits_for="last")[0].argmax(-1)), dim=1)
    return idx[:, prompt.shape[1] :]


@every_shape
def test_40_greedy_tokens_are_equal_with_and_without_KVC_1(shape):
    # untied, since a large tied table makes the last token the likeliest again and again
    model, prompt = tiny_model(**shape, block_size=48, tie_weights=False), tokens(2, 5)
    ids = greedy(model, prompt, 40, use_cache=True)
    assert torch.equal(ids, greedy(model, prompt, 40, use_cache=False))
    assert len(ids.unique()) > 1  # it does not just repeat itself


@every_shape
def test_bf16_agrees_loosely_KVC_16(shape):
    model, idx = tiny_model(**shape), tokens(2, 12)
    exact = uncached(model, idx)
    model.bfloat16()
    plain = uncached(model, idx).float()
    cached = in_chunks(model, idx, [5, 1, 6]).float()
    assert (plain - exact).norm() / exact.norm() < 0.1
    assert (cached - exact).norm() / exact.norm() < 0.1
    assert (cached - plain).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("attention", KINDS)
def test_number_formats_of_cache_and_model_may_differ_KVC_10(attention, position):
    idx = tokens(2, 8)
    for weights in (torch.float32, torch.bfloat16):
        for cache_dtype in (torch.float32, torch.bfloat16):
            for autocast in (False, True):
                model = tiny_model(attention=attention, position=position)
                exact = uncached(model, idx)
                cache = KVCache(model.to(weights).config, 2, 8, cache_dtype)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    got = in_chunks(model, idx, [5, 1, 2], cache).float()
                assert cache.k.dtype == cache.v.dtype == cache_dtype
                assert cache.nbytes == kv_cache_bytes(model.config, 8, cache_dtype, 2)
                assert (got - exact).norm() / exact.norm() < 0.1


# --- one kernel, three ways


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """A loop over rows and heads; mask: (B, T, S) bool."""
    B, H, _, D = q.shape
    out = torch.empty(q.shape)
    for b in range(B):
        for h in range(H):
            kv = h // (H // k.shape[1])
            scores = (q[b, h] @ k[b, kv].T / D**0.5).masked_fill(~mask[b], -torch.inf)
            out[b, h] = scores.softmax(-1) @ v[b, kv]
    return out


@pytest.mark.parametrize("n_kv_head", [1, 2, 3, 6])
@pytest.mark.parametrize(("T", "S"), [(7, 7), (1, 7), (3, 7), (1, 1)])
def test_attend_equals_a_loop_over_heads(n_kv_head, T, S):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, T, 8, generator=generator)
    k, v = (torch.randn(2, n_kv_head, S, 8, generator=generator) for _ in "kv")
    causal = torch.ones(T, S).tril(S - T).bool()
    # T = S is causal by itself, T = 1 sees all; in between the mask must be given
    mask = causal[None, None] if 1 < T < S else None
    same(attend(q, k, v, mask), attend_by_hand(q, k, v, causal.expand(2, T, S)))
    pad = torch.arange(S)[None, None, :] >= torch.tensor([0, min(S - 1, 2)])[:, None, None]
    free = causal & pad | torch.eye(T, S).roll(S - T, 1).bool()  # one mask per row
    same(attend(q, k, v, free[:, None]), attend_by_hand(q, k, v, free))


def test_masks_exist_where_they_must():
    cache = KVCache(tiny_config(), 1, 8)
    device = torch.device("cpu")
    assert attention_mask(5, None, device) is None and attention_mask(5, cache, device) is None
    cache.length = 3
    assert attention_mask(1, cache, device) is None
    assert attention_mask(2, cache, device).int().tolist() == [[[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
    cache.pad, cache.length = torch.tensor([0, 2]), 0
    assert attention_mask(3, cache, device)[:, 0].int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    ]
    cache.length = 3
    assert attention_mask(1, cache, device)[:, 0].int().tolist() == [[[1, 1, 1, 1]], [[0, 0, 1, 1]]]


# --- rows of unequal length


@pytest.mark.parametrize("chunks", [[9], [6, 3], [1] * 9, [8, 1]], ids=str)
@every_shape
def test_left_padded_rows_equal_their_own_runs_ATT_10(shape, chunks):
    model, lengths = tiny_model(**shape), [9, 4, 1, 8]  # the third row is padding all but its last token
    idx, pad = tokens(4, 9), torch.tensor([9 - n for n in lengths])
    cache = KVCache(model.config, 4, 9, pad=pad)
    got = in_chunks(model, idx, chunks, cache)
    assert torch.isfinite(got).all() and torch.isfinite(cache.k).all() and torch.isfinite(cache.v).all()
    for row, n in enumerate(lengths):
        same(got[row, -n:], uncached(model, idx[row : row + 1, -n:])[0])


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_what_stands_in_the_padding_does_not_matter_ATT_10(shape):
    model, pad = tiny_model(**shape), torch.tensor([3, 0])
    runs = []
    for filler in (0, 60):
        idx = tokens(2, 8)
        idx[0, :3] = filler
        runs.append(in_chunks(model, idx, [6, 2], KVCache(model.config, 2, 8, pad=pad)))
    assert torch.equal(runs[0][0, 3:], runs[1][0, 3:]) and torch.equal(runs[0][1], runs[1][1])


# --- a life outside the model


def test_the_model_forgets_the_cache_KVC_4():
    model, idx = tiny_model(), tokens(2, 9)
    before = uncached(model, idx)
    greedy(model, tokens(2, 5, seed=1), 10, use_cache=True)
    assert torch.equal(uncached(model, idx), before)
    cache = KVCache(model.config, 2, 9)
    for t in range(9):  # giving a cache is all it takes, and each call goes on where the last one ended
        assert cache.length == t
        model(idx[:, t : t + 1], cache=cache)
    assert cache.length == 9


def test_prompts_after_one_another_equal_fresh_runs_KVC_5():
    model = tiny_model(attention="gqa")
    for rows, n, seed in ((1, 5, 1), (3, 9, 2), (1, 3, 3)):
        prompt = tokens(rows, n, seed=seed)
        assert torch.equal(
            greedy(model, prompt, 8, True), greedy(tiny_model(attention="gqa"), prompt, 8, True)
        )


def test_a_full_cache_says_how_much_room_is_left_KVC_8():
    model = tiny_model()
    cache = KVCache(model.config, 1, 16)
    model(tokens(1, 10), cache=cache)
    with pytest.raises(ValueError) as error:
        model(tokens(1, 20), cache=cache)
    message = str(error.value)
    assert "\n" not in message
    assert all(words in message for words in ("holds 16 tokens", "10 are in it", "room for 6", "20 more")), (
        message
    )
    assert cache.length == 10 and model(tokens(1, 6), cache=cache)[0].shape == (1, 6, 61)
    with pytest.raises(ValueError, match="room for 0"):
        model(tokens(1, 1), cache=cache)


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_of_the_cache_stays_with_the_model_KVC_12(grad):
    # with gradients on, a graph that runs through the cache's own storage would never be freed
    torch.set_grad_enabled(grad)
    model = tiny_model(attention="gqa", position="rope")

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    model(tokens(2, 8), cache=KVCache(model.config, 2, 8))  # PyTorch's own are made in the first call
    before = live_tensors()
    cache = KVCache(model.config, 2, 8)
    logits = model(tokens(2, 8), cache=cache)
    assert live_tensors() > before
    del cache, logits
    torch.set_grad_enabled(True)
    assert live_tensors() == before


@pytest.mark.parametrize("attention", KINDS)
def test_sized_to_the_prompt_and_the_new_tokens_KVC_13(attention):
    c = GPTConfig(vocab_size=61, block_size=1024, n_layer=2, n_head=4, n_embd=32, attention=attention)
    model, cache = GPT(c).eval(), KVCache(c, 1, 30)
    assert (
        cache.k.shape == cache.v.shape == (2, 1, c.n_kv_head, 30, 8)
    )  # as many heads as there are, not one per query
    assert cache.max_len == 30 and cache.nbytes == kv_cache_bytes(c, 30) == 2 * 2 * c.n_kv_head * 30 * 8 * 4
    addresses = cache.k.data_ptr(), cache.v.data_ptr()
    with torch.inference_mode():
        model(tokens(1, 10), cache=cache)
        for t in range(20):
            model(tokens(1, 1, seed=t), cache=cache)
    assert cache.length == 30 and (cache.k.data_ptr(), cache.v.data_ptr()) == addresses  # it never grew


@pytest.mark.parametrize("attention", KINDS)
def test_keys_are_written_once_per_kv_head(attention):
    model = tiny_model(attention=attention, n_layer=1, norm="post")
    layer, c, idx = model.transformer["h"][0].attn, model.config, tokens(2, 6)
    cache = KVCache(c, 2, 8)
    in_chunks(model, idx, [4, 2], cache)
    with torch.no_grad():
        x = model.transformer["wte"](idx) + model.transformer["wpe"].weight[:6]
        kv = layer.c_attn(x)[..., c.n_embd :].view(2, 6, 2, c.n_kv_head, c.head_dim)
    for stored, expected in ((cache.k, kv[:, :, 0]), (cache.v, kv[:, :, 1])):
        torch.testing.assert_close(stored[0, :, :, :6], expected.transpose(1, 2), atol=1e-5, rtol=0)
        assert torch.all(stored[:, :, :, 6:] == 0)


# --- rows that multiply and leave


@pytest.mark.parametrize("pad", [None, [2, 0]], ids=["full", "padded"])
@every_shape
def test_repeat_serves_several_samples_from_one_prefill(shape, pad):
    model, idx, more = tiny_model(**shape), tokens(2, 6), tokens(6, 3, seed=1)
    pad = None if pad is None else torch.tensor(pad)
    cache = KVCache(model.config, 2, 9, pad=pad)
    in_chunks(model, idx, [6], cache)
    wide = cache.repeat(3)
    assert (wide.length, wide.max_len, wide.nbytes) == (6, 9, 3 * cache.nbytes)
    got = in_chunks(model, more, [1, 2], wide)
    assert cache.length == 6 and torch.all(cache.k[:, :, :, 6:] == 0)  # the first one is left as it was
    whole = torch.cat((idx.repeat_interleave(3, dim=0), more), dim=1)
    for row in range(6):
        skip = 0 if pad is None else int(pad[row // 3])
        same(got[row], uncached(model, whole[row : row + 1, skip:])[0, -3:])


@pytest.mark.parametrize("pad", [None, [3, 0, 1, 2]], ids=["full", "padded"])
@every_shape
def test_rows_that_stay_go_on_as_if_alone(shape, pad):
    model, idx = tiny_model(**shape), tokens(4, 9)
    pads = [0] * 4 if pad is None else pad
    cache = KVCache(model.config, 4, 9, pad=None if pad is None else torch.tensor(pad))
    in_chunks(model, idx[:, :5], [5], cache)
    before = cache.nbytes
    rows = [0, 1, 2, 3]
    for kept, chunks in (([0, 2, 3], slice(5, 7)), ([2, 0], slice(7, 9))):
        cache.keep(kept)
        rows = [rows[at] for at in kept]
        got = in_chunks(model, idx[rows, chunks], [1, 1], cache)
        for at, row in enumerate(rows):
            same(got[at], uncached(model, idx[row : row + 1, pads[row] : chunks.stop])[0, -2:])
    assert rows == [3, 0] and cache.nbytes == before // 2 and cache.length == 9
