"""Sampling: the draw, the text as it comes, the loop around the model, and sample.py as a program."""

import contextlib
import gc
import io
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import KINDS, ROOT, SHAPES, shape_id, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import config as configuration
import generation
import sample
import train
from checkpoint import load_checkpoint, save_checkpoint
from data.tokenizer import EOT, Tokenizer, bpe_tokenizer, char_tokenizer
from generation import Sampling, TextStream, choose, fit_context, uniform_numbers
from model import GPT, GPTConfig, as_mha, kv_cache_bytes
from sample import SampleConfig


def generate(model: GPT, tokenizer: Tokenizer, prompt: list[int], num_samples: int = 1, **options):
    """One prompt, several samples."""
    return generation.generate(model, tokenizer, [prompt] * num_samples, **options)


TOKENIZER = char_tokenizer("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"[:60])
PROMPT = TOKENIZER.encode("AbcdEfghij")  # 10 tokens
ONE = 1 - 2**-53  # the largest number that a draw can be
GREEDY = Sampling(temperature=0)
every_kind = pytest.mark.parametrize("attention", KINDS)


def log(*probs: float) -> Tensor:
    """Scores (1, V) of the given probabilities."""
    return torch.tensor([probs]).log()


def shares(logits: Tensor, s: Sampling, seen: Tensor | None = None, n: int = 10_000) -> list[float]:
    """How often each token is drawn when the uniform numbers are an even grid: its probability."""
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ids = choose(logits.expand(n, -1), u, s, None if seen is None else seen.expand(n, -1))
    return (ids.bincount(minlength=logits.shape[1]) / n).tolist()


def close(*probs: float):
    return pytest.approx(probs, abs=2e-4)


# --- one draw


def test_temperature_0_is_argmax_and_1_the_model_itself_SMP_1():
    p = (0.1, 0.6, 0.3)
    assert shares(log(*p), Sampling(temperature=0)) == [0, 1, 0]
    assert shares(log(*p), Sampling(temperature=1)) == close(*p)
    squares = [x * x for x in p]
    assert shares(log(*p), Sampling(temperature=0.5)) == close(*(x / sum(squares) for x in squares))
    with pytest.raises(ValueError, match=r"temperature=-1: must be 0 .* or more"):
        Sampling(temperature=-1)


@pytest.mark.parametrize("top_k", [None, 0, 4, 5, 10**9])
def test_top_k_off_SMP_2(top_k):
    p = (0.4, 0.3, 0.2, 0.1)
    assert shares(log(*p), Sampling(temperature=1, top_k=top_k)) == close(*p)
    assert shares(log(*p), Sampling(temperature=1, top_k=top_k, top_p=0.6)) == close(4 / 7, 3 / 7, 0, 0)


def test_top_k_keeps_the_k_likeliest_SMP_2():
    assert shares(log(0.1, 0.4, 0.2, 0.3), Sampling(temperature=1, top_k=1)) == [0, 1, 0, 0]
    assert shares(log(0.1, 0.4, 0.2, 0.3), Sampling(temperature=1, top_k=2)) == close(0, 4 / 7, 0, 3 / 7)
    with pytest.raises(ValueError, match="top_k=-1: must be positive, or 0 for off"):
        Sampling(top_k=-1)


def test_scores_below_0_with_top_k_1_give_the_argmax_SMP_4():
    logits = -50 - 10 * torch.rand(1000, 40, generator=torch.Generator().manual_seed(0))
    u = uniform_numbers(0, 1, 1000)[0]
    assert torch.equal(choose(logits, u, Sampling(temperature=1.5, top_k=1)), logits.argmax(-1))


def test_top_p_keeps_the_token_that_crosses_SMP_5():
    third = Sampling(temperature=1, top_p=0.8)
    assert shares(log(0.4, 0.3, 0.2, 0.1), third) == close(4 / 9, 3 / 9, 2 / 9, 0)
    assert shares(log(0.1, 0.3, 0.4, 0.2), third) == close(0, 3 / 9, 4 / 9, 2 / 9)  # in any order
    second = Sampling(temperature=1, top_p=0.6)
    assert shares(log(0.5, 0.3, 0.15, 0.05), second) == close(5 / 8, 3 / 8, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30), st.floats(0.001, 0.999))
def test_top_p_is_the_smallest_set_that_reaches_it_SMP_5(scores, top_p):
    logits = torch.tensor([scores])
    kept = torch.tensor(shares(logits, Sampling(temperature=1, top_p=top_p), n=3000)) > 0
    p = logits.double().softmax(-1)[0]
    assert p[~kept & (p > 2e-3)].sum() < 1 - top_p + 1e-6 + 2e-3 * (p <= 2e-3).sum()
    assert p[kept].sum() - p[kept].min() < top_p + 1e-6  # without its least likely one it falls short
    assert p[kept].min() >= p[~kept].max() - 1e-6 if not kept.all() and p[~kept].max() > 2e-3 else True


@pytest.mark.parametrize("top_p", [0, 1e-8])
def test_a_top_p_of_nearly_0_is_argmax_SMP_6(top_p):
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, 7] = 9.0  # ties are many in bfloat16; the likeliest is one
    for u in (0.0, 0.5, ONE):
        ids = choose(logits, torch.full((64,), u, dtype=torch.float64), Sampling(temperature=1, top_p=top_p))
        assert torch.all(ids == 7)


def test_a_million_draws_stay_in_the_allowed_set_SMP_8():
    logits = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    two = logits[0].topk(2).indices
    u = uniform_numbers(0, 1, 1_000_000)[0]
    counts = choose(logits.expand(1_000_000, -1), u, Sampling(temperature=1, top_k=2)).bincount(minlength=16)
    assert counts.sum() == counts[two].sum() == 1_000_000
    expected = logits[0, two].softmax(-1)[0].item()
    assert counts[two[0]] / 1e6 == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 1e6))


scores = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([-math.inf, 0.0, 5.0, -1e30, 1e30]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(scores, min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf),
    st.one_of(st.floats(0, ONE), st.sampled_from([0.0, ONE])),
    st.builds(
        Sampling,
        temperature=st.one_of(st.floats(0, 100), st.sampled_from([1e-300, 1e-45, 1e-6, 1e300])),
        top_k=st.one_of(st.none(), st.integers(0, 20)),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
    ),
)
def test_a_draw_is_a_token_that_may_be_drawn_SMP_8_SMP_9(row, u, s):
    chosen = choose(torch.tensor([row]), torch.tensor([u], dtype=torch.float64), s)
    assert chosen.shape == (1,) and 0 <= chosen.item() < len(row)
    assert row[chosen.item()] > -math.inf
    if s.top_k:
        assert sum(score > row[chosen.item()] for score in row) < s.top_k
    if s.temperature == 0 or s.top_k == 1 or s.min_p == 1 or s.temperature <= 1e-45:
        assert row[chosen.item()] == max(row)


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45, 1e-50, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tiny_temperature_is_argmax_SMP_10(temperature, dtype):
    logits = torch.tensor([[-3.0, 40.0, 39.0, -60000.0], [0.0, -1.0, -2.0, -3.0]]).to(dtype)
    for u in (0.0, ONE):
        uu = torch.tensor([u, u], dtype=torch.float64)
        assert choose(logits, uu, Sampling(temperature=temperature)).tolist() == [1, 0]
        assert choose(logits, uu, Sampling(temperature=temperature, top_p=0.9)).tolist() == [1, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_scores_that_are_no_numbers_are_reported_SMP_10(bad, temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    with pytest.raises(ValueError, match=r"NaN or inf.*diverged.*--dtype=float32 or an earlier checkpoint"):
        choose(logits, torch.zeros(2), Sampling(temperature=temperature))
    with pytest.raises(ValueError, match="NaN or inf"):
        choose(torch.full((1, 3), -math.inf), torch.zeros(1), Sampling(temperature=temperature))


def test_top_k_comes_before_top_p_SMP_16():
    p = log(0.4, 0.3, 0.2, 0.1)
    assert shares(p, Sampling(temperature=1, top_p=0.42)) == close(4 / 7, 3 / 7, 0, 0)
    assert shares(p, Sampling(temperature=1, top_k=3, top_p=0.42)) == [1, 0, 0, 0]  # .4 is 4/9 of the three
    assert shares(p, Sampling(temperature=1, top_k=2, top_p=0.95)) == close(4 / 7, 3 / 7, 0, 0)
    with pytest.raises(ValueError, match=r"top_p=1.5: must be between 0 and 1"):
        Sampling(top_p=1.5)
    with pytest.raises(ValueError, match=r"top_p=-0.1: must be between 0 and 1"):
        Sampling(top_p=-0.1)


def test_min_p_drops_what_is_less_likely_than_a_share_of_the_likeliest():
    p = (0.5, 0.3, 0.15, 0.05)
    assert shares(log(*p), Sampling(temperature=1, min_p=0.2)) == close(50 / 95, 30 / 95, 15 / 95, 0)
    assert shares(log(*p), Sampling(temperature=1, min_p=0.31)) == close(5 / 8, 3 / 8, 0, 0)
    assert shares(log(*p), Sampling(temperature=1, min_p=1)) == [1, 0, 0, 0]
    # after the temperature: squared, .05 is 1 % of .5
    assert shares(log(*p), Sampling(temperature=0.5, min_p=0.05))[3] == 0
    with pytest.raises(ValueError, match="min_p=2: must be between 0 and 1"):
        Sampling(min_p=2)


def test_repetition_penalty_by_hand():
    logits, seen = torch.tensor([[2.0, -1.0, 1.5, -1.5]]), torch.tensor([[True, True, False, False]])
    penalty = Sampling(temperature=1, repetition_penalty=2)
    expected = torch.tensor([1.0, -2.0, 1.5, -1.5]).softmax(-1).tolist()
    assert shares(logits, penalty, seen) == close(*expected)
    assert shares(logits, Sampling(temperature=0, repetition_penalty=2), seen) == [0, 0, 1, 0]
    assert shares(logits, Sampling(temperature=1), seen) == close(*logits[0].softmax(-1).tolist())
    with pytest.raises(ValueError, match="repetition_penalty=0: must be above 0"):
        Sampling(repetition_penalty=0)


def test_a_row_is_drawn_as_if_alone_PRF_12():
    logits = 3 * torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    seen, u = logits > 2, uniform_numbers(0, 20, 1)[:, 0]
    for s in (Sampling(), Sampling(top_k=5, top_p=0.8), Sampling(min_p=0.1, repetition_penalty=1.3)):
        alone = [choose(logits[i : i + 1], u[i : i + 1], s, seen[i : i + 1]).item() for i in range(20)]
        before = logits.clone()
        assert choose(logits, u, s, seen).tolist() == alone and torch.equal(logits, before)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32, 2**63 - 1])
def test_uniform_numbers_depend_on_seed_and_row_alone_SMP_13(seed):
    u = uniform_numbers(seed, 3, 50)
    assert u.shape == (3, 50) and u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert torch.equal(uniform_numbers(seed, 5, 20)[:3], u[:, :20])
    assert len(u.flatten().unique()) == 150
    for other in {0, 1, -1, 2**31, 2**32, 2**63 - 1} - {seed}:
        assert not (set(uniform_numbers(other, 3, 50).flatten().tolist()) & set(u.flatten().tolist()))


def test_uniform_numbers_are_uniform():
    u = uniform_numbers(0, 4, 25_000)
    assert torch.histc(u, 10, 0, 1).tolist() == pytest.approx([10_000] * 10, abs=500)
    assert u[0] @ u[1] / 25_000 == pytest.approx(0.25, abs=0.01)


# --- text as it comes


class Pieces:
    """A tokenizer whose ids stand for the given byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.pieces[i] for i in ids)


def stream(pieces: list[bytes], stop: str | None) -> list[str]:
    """What a TextStream gives for tokens of these bytes, fed until it has stopped, as generate does."""
    out = TextStream(Pieces(pieces), stop)
    shown = []
    for i in range(len(pieces)):
        shown.append(out.push([i]))
        if out.stopped:
            break
    shown.append(out.push([], final=True))
    assert out.text == "".join(shown)
    return shown


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(at)]


letters = st.text(st.sampled_from("abc—é😀\n"), max_size=30)
places = st.lists(st.integers(0, 200), max_size=30)
stops = st.one_of(st.none(), st.text(st.sampled_from("abc—é😀\n"), min_size=1, max_size=4))


@settings(max_examples=300, deadline=None)
@given(st.one_of(letters, st.text(st.characters(codec="utf-8"), max_size=30)), places, stops)
def test_streamed_text_is_the_text_before_the_stop_SMP_14(text, at, stop):
    shown = stream(cut(text.encode("utf-8"), at), stop)
    assert "".join(shown) == (text.split(stop)[0] if stop else text)  # and so no character was ever split


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30), places)
def test_bytes_that_are_no_text_come_out_as_decode_would_give_them(data, at):
    assert "".join(stream(cut(data, at), None)) == data.decode("utf-8", errors="replace")


def test_text_is_shown_as_soon_as_it_is_certain_SMP_14():
    assert stream([b"a", b"b", b"c"], None) == ["a", "b", "c", ""]
    assert stream(["é".encode()[:1], "é".encode()[1:], b"x"], None) == ["", "é", "x", ""]
    assert stream([b"x", b"<", b"e", b"y", b"<", b"end>"], "<end>") == ["x", "", "", "<ey", "", "", ""]
    assert stream([b"aa", b"a", b"b"], "aab") == ["", "a", "", ""]
    assert stream([b"x<", b"en"], "<end>") == ["x", "", "<en"]  # it did not come


def test_nothing_follows_the_stop_string():
    out = TextStream(Pieces([b"a.\xe2", b"b"]), ".")  # the stop, and the first byte of a character after it
    assert [out.push([0]), out.push([1]), out.push([], final=True)] == ["a", "", ""] and out.text == "a"


# --- the end of the context


@pytest.mark.parametrize(
    ("n_prompt", "n_new", "block", "rule", "expected"),
    [
        (10, 5, 32, "error", (10, 5)),
        (10, 22, 32, "error", (10, 22)),
        (10, 23, 32, "error", "room for 22"),
        (10, 23, 32, "stop", (10, 22)),
        (10, 5, 32, "stop", (10, 5)),
        (10, 100, 32, "refill", (10, 100)),
        (30, 100, 32, "error", "room for 2;"),
        (30, 100, 32, "stop", (30, 2)),
        (30, 100, 32, "refill", (30, 100)),
        (32, 0, 32, "error", (32, 0)),
        (32, 1, 32, "error", "no room to go on"),
        (32, 1, 32, "stop", "no room to go on"),
        (32, 1, 32, "refill", (32, 1)),
        (33, 0, 32, "error", "no room to go on"),
        (50, 5, 32, "error", "no room to go on"),
        (50, 5, 32, "stop", "no room to go on"),
        (50, 5, 32, "refill", (16, 5)),
        (1, 3, 1, "refill", (1, 3)),
        (5, 3, 1, "refill", (1, 3)),
        (0, 5, 32, "error", "prompt is empty"),
        (0, 5, 32, "refill", "prompt is empty"),
    ],
)
def test_fit_context_KVC_6(n_prompt, n_new, block, rule, expected):
    prompt = list(range(n_prompt))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected) as error:
            fit_context(prompt, n_new, block, rule)
        assert "\n" not in str(error.value)
        if n_prompt:  # says what was asked for, and what there is
            assert f"{n_prompt} tokens" in str(error.value) and f"block_size={block}" in str(error.value)
    else:
        kept, allowed = fit_context(prompt, n_new, block, rule)
        assert (len(kept), allowed) == expected and kept == prompt[n_prompt - len(kept) :]  # the end is kept


# --- the loop around the model


def untied(seed: int = 0, **changes) -> GPT:
    """A tiny model that does not just repeat its last token."""
    return tiny_model(seed, tie_weights=False, **changes)


@torch.inference_mode()
def by_hand(model: GPT, prompt: list[int], n: int) -> list[int]:
    """The likeliest tokens one after the other, the whole text read anew for each, by the stated rule."""
    block, sight, new = model.config.block_size, list(prompt), []
    if len(sight) > block:
        sight = sight[-(block // 2) :]
    while len(new) < n:
        if len(sight) > block:
            sight = sight[-(block // 2) :]
        token = model(torch.tensor([sight]))[0][0, -1].argmax().item()
        if token == TOKENIZER.eot_id:
            break
        new.append(token)
        sight.append(token)
    return new


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_cache_on_and_off_draw_the_same_up_to_the_end_of_the_context_SMP_13_KVC_16(shape):
    model = untied(**shape)
    for rule, n in (("error", 22), ("stop", 50)):
        on, off = (
            generate(
                model,
                TOKENIZER,
                PROMPT,
                num_samples=3,
                max_new_tokens=n,
                kv_cache=cache,
                context_end=rule,
                sampling=Sampling(temperature=0.7),
            )
            for cache in (True, False)
        )
        assert on.token_ids == off.token_ids and on.texts == off.texts
        assert on.new_tokens == off.new_tokens <= 66 and on.prompt_tokens == 10 and on.refills == 0
        assert len(set(on.texts)) == 3 and max(map(len, on.token_ids)) == 22
        assert (off.cache_bytes_allocated, off.cache_bytes_used) == (0, 0)


@pytest.mark.parametrize(
    ("n_prompt", "shape"),
    [(30, shape) for shape in SHAPES] + [(32, SHAPES[0]), (50, SHAPES[7])],
    ids=lambda x: str(x) if isinstance(x, int) else shape_id(x),
)
def test_past_the_end_of_the_context_KVC_6(n_prompt, shape):
    model = untied(**shape)
    prompt = (PROMPT * 5)[:n_prompt]
    expected = by_hand(model, prompt, 100)
    for cache in (True, False):
        g = generate(
            model,
            TOKENIZER,
            prompt,
            max_new_tokens=100,
            sampling=GREEDY,
            context_end="refill",
            kv_cache=cache,
        )
        assert g.token_ids == [expected] and g.texts == [TOKENIZER.decode(expected)]
        assert g.prompt_tokens == (16 if n_prompt == 50 else n_prompt)
        assert g.new_tokens == len(expected) + (len(expected) < 100) and g.decode_tokens == g.new_tokens - 1
        if len(expected) == 100:  # each refill makes room for 16 more
            room = 32 - g.prompt_tokens
            assert g.refills == math.ceil((100 - 1 - room) / 17)


def test_past_the_end_in_a_batch_KVC_6():
    model = untied(attention="gqa", position="rope")
    on, off = (
        generate(model, TOKENIZER, PROMPT, num_samples=4, max_new_tokens=80, context_end="refill", kv_cache=c)
        for c in (True, False)
    )
    assert on.token_ids == off.token_ids and on.refills == off.refills > 0
    assert len({len(ids) for ids in on.token_ids}) > 1  # some rows ended earlier than others


def test_a_context_of_one_token():
    model = untied(block_size=1, position="rope")
    on, off = (
        generate(model, TOKENIZER, [3], max_new_tokens=5, context_end="refill", kv_cache=c)
        for c in (True, False)
    )
    assert on.token_ids == off.token_ids and on.new_tokens >= 1


def test_greedy_is_the_same_text_each_time_SMP_1():
    model = untied()
    runs = [
        generate(model, TOKENIZER, PROMPT, max_new_tokens=20, sampling=GREEDY, seed=seed, num_samples=2)
        for seed in (0, 1)
    ]
    assert runs[0].token_ids == runs[1].token_ids == [by_hand(model, PROMPT, 20)] * 2


def test_seeds_SMP_13():
    model = untied()

    def texts(seed: int, n: int = 3, n_new: int = 20) -> list[str]:
        return generate(model, TOKENIZER, PROMPT, max_new_tokens=n_new, num_samples=n, seed=seed).texts

    first = texts(0)
    assert texts(0) == first and len(set(first)) == 3
    torch.manual_seed(5)  # nobody else's generator plays a part, nor is it moved
    state = torch.get_rng_state()
    assert texts(0) == first and torch.equal(torch.get_rng_state(), state)
    for seed in (1, -1, 2**31, 2**32):
        assert not set(texts(seed)) & set(first)
    assert texts(0, n=1) == first[:1] and texts(0, n=2) == first[:2] and texts(0, n=6)[:3] == first
    assert [long[:10] for long in first] == texts(0, n_new=10)


def test_another_prompt_or_number_of_samples_after_it_KVC_5():
    model = untied(attention="gqa")
    other = TOKENIZER.encode("zyxwv")
    fresh = {
        n: generate(untied(attention="gqa"), TOKENIZER, other, max_new_tokens=9, num_samples=n)
        for n in (1, 3)
    }
    generate(model, TOKENIZER, PROMPT, max_new_tokens=20)
    for n in (1, 3, 1):
        assert (
            generate(model, TOKENIZER, other, max_new_tokens=9, num_samples=n).token_ids == fresh[n].token_ids
        )


@pytest.mark.parametrize("n_new", [0, 1, 5])
def test_max_new_tokens_counts_new_ones_KVC_17(n_new):
    model, calls = untied(), []
    model.register_forward_pre_hook(lambda *args: calls.append(args))
    g = generate(model, TOKENIZER, PROMPT, max_new_tokens=n_new, num_samples=2, seed=1)
    assert [len(ids) for ids in g.token_ids] == [n_new, n_new] and g.new_tokens == 2 * n_new
    assert g.prompt_tokens == 10 and g.decode_tokens == max(0, 2 * n_new - 2)
    assert len(calls) == (0 if n_new == 0 else 3 + n_new)  # warm-up, prefill, decode
    if n_new == 0:
        assert g.texts == ["", ""] and g.first_token_seconds == g.prefill_seconds == 0


@every_kind
def test_cache_bytes_by_the_formula_KVC_13(attention):
    model = untied(attention=attention)
    g = generate(model, TOKENIZER, PROMPT, max_new_tokens=12, num_samples=3, seed=1)
    assert [len(ids) for ids in g.token_ids] == [12, 12, 12]
    heads = {"mha": 4, "gqa": 2, "mqa": 1}[attention]
    assert (
        g.cache_bytes_allocated
        == kv_cache_bytes(model.config, 22, batch_size=3)
        == 2 * 2 * 3 * heads * 22 * 8 * 4
    )
    assert g.cache_bytes_used == kv_cache_bytes(model.config, 21, batch_size=3)  # all but the last


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the draw: sample i gets the tokens of script[i] in order, "." being the end-of-text id.

    Returns a function that takes the script, and a list that fills with (step, samples asked, scores).
    """
    asked: list[tuple[int, list[int], Tensor]] = []

    def set_script(*script: str) -> None:
        ids = [[TOKENIZER.eot_id if c == "." else TOKENIZER.encode(c)[0] for c in row] for row in script]

        def scripted_choose(logits: Tensor, u: Tensor, s: Sampling, seen: Tensor | None = None) -> Tensor:
            step = len(asked)
            rows = [i for i, row in enumerate(ids) if step < len(row)]
            asked.append((step, rows, logits.clone()))
            assert torch.equal(u, uniform_numbers(0, len(ids), step + 1)[rows, step])
            return torch.tensor([ids[i][step] for i in rows])

        monkeypatch.setattr(generation, "choose", scripted_choose)

    return set_script, asked


@pytest.mark.parametrize("kv_cache", [True, False])
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]], ids=shape_id)
def test_each_row_is_cut_at_its_own_end_SMP_12(shape, kv_cache, scripted):
    set_script, asked = scripted
    set_script("A.", "BCDE.", "FGHIJKLM")  # ends at step 2, at step 5, never
    model, shown = untied(**shape), []
    g = generate(
        model, TOKENIZER, PROMPT, num_samples=3, max_new_tokens=8, kv_cache=kv_cache, show=shown.append
    )
    assert g.texts == ["A", "BCDE", "FGHIJKLM"] and "".join(shown) == "A"
    assert g.token_ids == [TOKENIZER.encode(text) for text in g.texts]
    assert g.new_tokens == 2 + 5 + 8 and g.decode_tokens == 1 + 4 + 7
    assert [rows for _, rows, _ in asked] == [[0, 1, 2]] * 2 + [[1, 2]] * 3 + [[2]] * 3
    for step, rows, logits in asked:  # those that stay see their own text, not that of who has left
        for at, row in enumerate(rows):
            text = torch.tensor([PROMPT + g.token_ids[row][:step]])
            torch.testing.assert_close(logits[at], model(text)[0][0, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("script", "steps"), [((".", "A.", "B."), 2), ((".", ".", "."), 1), (("ABCDEFGH",) * 3, 8)]
)
def test_the_loop_ends_when_all_rows_have_SMP_12(script, steps, scripted):
    set_script, asked = scripted
    set_script(*script)
    g = generate(untied(), TOKENIZER, PROMPT, num_samples=3, max_new_tokens=8)
    assert len(asked) == steps and g.texts == [row.rstrip(".") for row in script]
    assert g.new_tokens == sum(map(len, script)) and g.decode_tokens == g.new_tokens - 3


def test_a_stop_string_ends_each_row_at_its_own_place_SMP_12(scripted):
    set_script, asked = scripted
    set_script("xxY", "abxY", "xYxYxYxY"[:2], "aXyxXYab")
    shown = []
    g = generate(untied(), TOKENIZER, PROMPT, num_samples=4, max_new_tokens=8, stop="xY", show=shown.append)
    assert g.texts == ["x", "ab", "", "aXyxXYab"] and shown == ["x"]
    assert [TOKENIZER.decode(ids) for ids in g.token_ids] == ["xxY", "abxY", "xY", "aXyxXYab"]
    assert g.new_tokens == 3 + 4 + 2 + 8 and len(asked) == 8


def test_the_repetition_penalty_knows_prompt_and_new_tokens_of_its_own_row(monkeypatch):
    seen_at = []

    def spy(logits: Tensor, u: Tensor, s: Sampling, seen: Tensor | None = None) -> Tensor:
        assert seen.shape == logits.shape
        seen_at.append([row.nonzero().flatten().tolist() for row in seen])
        return choose(logits, u, s, seen)

    monkeypatch.setattr(generation, "choose", spy)
    g = generate(
        untied(),
        TOKENIZER,
        PROMPT,
        num_samples=2,
        max_new_tokens=8,
        seed=1,
        sampling=Sampling(repetition_penalty=1.5),
    )
    assert [len(ids) for ids in g.token_ids] == [8, 8]
    for step, seen in enumerate(seen_at):
        assert seen == [sorted({*PROMPT, *ids[:step]}) for ids in g.token_ids]
    # a penalty without measure: no token comes twice
    g = generate(
        untied(),
        TOKENIZER,
        PROMPT,
        max_new_tokens=20,
        sampling=Sampling(temperature=0, repetition_penalty=1e6),
    )
    assert len(set(PROMPT + g.token_ids[0])) == 10 + len(g.token_ids[0])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_padding_in_the_vocabulary_is_never_drawn_DAT_9(n, penalty):
    tokenizer = bpe_tokenizer([], 256)
    torch.manual_seed(0)
    c = GPTConfig(
        vocab_size=304, block_size=64, n_layer=1, n_head=2, n_embd=16, tie_weights=False, norm="pre"
    )
    model = GPT(c).eval()
    with torch.no_grad():
        model.lm_head.weight[257:] = 10 * torch.randn(47, 16)  # the likeliest, were they tokens
    sampling = Sampling(temperature=1.5, repetition_penalty=penalty)
    g = generate(
        model,
        tokenizer,
        [65],
        num_samples=n,
        max_new_tokens=500,
        sampling=sampling,
        seed=4,
        context_end="refill",
    )
    assert all(0 <= token < 256 for ids in g.token_ids for token in ids) and g.new_tokens >= 500
    assert g.texts == [tokenizer.decode(ids) for ids in g.token_ids]


def test_an_id_that_does_not_exist_is_named_SMP_9(monkeypatch):
    bad = -9223372036854775808
    monkeypatch.setattr(generation, "choose", lambda *args: torch.tensor([bad]))
    with pytest.raises(ValueError, match=f"token id {bad} is outside this char tokenizer's 61 ids"):
        generate(untied(), TOKENIZER, PROMPT, max_new_tokens=3)


@pytest.mark.parametrize("n", [1, 2])
def test_a_diverged_model_is_reported_SMP_10(n):
    model = untied()
    with torch.no_grad():
        model.transformer["h"][0].mlp.c_fc.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"NaN or inf.*earlier checkpoint"):
        generate(model, TOKENIZER, PROMPT, max_new_tokens=3, num_samples=n)


def test_nothing_stays_in_memory_KVC_12():
    model = untied()

    def live_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    generate(model, TOKENIZER, PROMPT, max_new_tokens=3)  # PyTorch's own are made in the first call
    before, during = live_tensors(), []
    g = generate(
        model,
        TOKENIZER,
        PROMPT,
        max_new_tokens=1,
        num_samples=2,
        show=lambda _: during.append(live_tensors()),
    )
    assert len(g.token_ids[0]) == len(during) == 1 and during[0] > before == live_tensors()


def test_only_the_last_position_is_scored_PRF_10():
    model, shapes = untied(), []
    model.lm_head.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    for kv_cache in (True, False):
        generate(
            model,
            TOKENIZER,
            PROMPT,
            max_new_tokens=40,
            num_samples=2,
            context_end="refill",
            kv_cache=kv_cache,
        )
    assert len(shapes) > 40 and {shape[1:] for shape in shapes} == {(1, 32)}


def test_samples_are_one_batch_and_the_prompt_is_read_once_PRF_12():
    model, shapes = untied(), []
    model.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
    g = generate(model, TOKENIZER, PROMPT, max_new_tokens=6, num_samples=8, seed=1)
    assert g.new_tokens == 48
    assert shapes[3:] == [(1, 10)] + [(8, 1)] * 5  # after the warm-up


def test_clocks_are_read_when_the_device_is_done_and_warm_PRF_1_PRF_2(monkeypatch):
    events, now = [], [0.0]

    def perf_counter() -> float:
        events.append("clock")
        return now[0]

    def forward(model: GPT, args: tuple, out: object) -> None:
        events.append(f"read {args[0].shape[1]}")
        now[0] += 100.0 if len(events) <= 3 else float(args[0].shape[1])  # slow at first, then 1 s per token

    model = untied()
    model.register_forward_hook(forward)
    monkeypatch.setattr(generation, "synchronize", lambda device: events.append("sync"))
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=perf_counter))
    g = generate(model, TOKENIZER, PROMPT, max_new_tokens=3, seed=1)
    assert events == [
        "read 1",
        "read 1",
        "read 1",
        "sync",
        "clock",
        "read 10",
        "sync",
        "clock",
        "sync",
        "clock",
        "read 1",
        "read 1",
        "sync",
        "clock",
    ]
    assert (g.prefill_seconds, g.first_token_seconds, g.decode_seconds) == (
        10.0,
        10.0,
        2.0,
    )  # no warm-up in them
    assert g.decode_tokens == 2
    r = sample.make_report(SampleConfig(max_new_tokens=3), model, g, torch.device("cpu"))
    assert (
        r["prefill_tokens_per_sec"] == r["decode_tokens_per_sec"] == 1.0
    )  # each by its own tokens and seconds


def test_the_first_row_is_shown_token_by_token_SMP_14():
    shown = []
    g = generate(untied(), TOKENIZER, PROMPT, max_new_tokens=7, num_samples=3, seed=1, show=shown.append)
    assert shown == list(g.texts[0]) and len(shown) == 7


# --- sample.py, on a run that train.py made


TEXT = "The cat sat on the mat. One plus one = two.\nWho is it? — A naïve dog: it's <|endoftext|>.\n" * 60


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a text and a tiny run in out/tiny, trained by train.py."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes.txt").write_text(TEXT, encoding="utf-8", newline="")
    options = "--n_layer=2 --n_head=4 --n_embd=32 --block_size=64 --batch_size=8 --max_iters=20"
    options += " --learning_rate=1e-2"
    nowhere = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        train.main(["--dataset=notes.txt", "--tokenizer=char", "--out_dir=out/tiny", *options.split()])
    return folder


@pytest.fixture
def here(home, monkeypatch) -> Path:
    """The folder as the working directory."""
    monkeypatch.chdir(home)
    return home


def saved_variant(home: Path, name: str, dtype: torch.dtype = torch.float32, **changes) -> str:
    """Another run with the same tokenizer; its folder."""
    tokenizer = load_checkpoint(home / "out/tiny").tokenizer
    vocab_size = Tokenizer.from_dict(tokenizer).vocab_size
    model = tiny_model(vocab_size=vocab_size, block_size=64, **changes).to(dtype)
    return str(save_checkpoint(home / "runs" / name, 1, model, tokenizer, {}).parents[1])


REPORTED = {
    "attention", "prompt_tokens", "new_tokens", "num_samples", "dtype", "device", "prefill_tokens_per_sec",
    "decode_tokens_per_sec", "decode_tokens_per_sec_per_sequence", "time_to_first_token_seconds",
    "kv_cache_bytes_allocated", "kv_cache_bytes_used", "kv_cache_bytes_formula", "kv_cache_bytes_mha",
    "texts", "token_ids",
}  # fmt: skip


def test_report_PRF_1(here, tmp_path, capsys):
    path = tmp_path / "report.json"
    returned = sample.main(
        [f"--report={path}", "--prompt=The cat", "--num_samples=3", "--max_new_tokens=20", "--seed=3"]
    )
    r = json.loads(path.read_text(encoding="utf-8"))
    assert not REPORTED - r.keys() and {key: r[key] for key in returned} == returned
    assert (r["attention"], r["num_samples"], r["dtype"], r["seed"]) == ("mha", 3, "float32", 3)
    assert r["device"] in ("cpu", "cuda", "mps") and r["prompt"] == "The cat" and r["prompt_tokens"] == 7
    assert len(r["texts"]) == len(r["token_ids"]) == 3
    tokenizer = Tokenizer.from_dict(load_checkpoint(Path("out/tiny")).tokenizer)
    assert r["texts"] == [tokenizer.decode(ids) for ids in r["token_ids"]]
    assert r["new_tokens"] == sum(len(ids) + (len(ids) < 20) for ids in r["token_ids"])
    assert r["prefill_tokens_per_sec"] * r["prefill_seconds"] == pytest.approx(7)
    assert r["decode_tokens_per_sec"] * r["decode_seconds"] == pytest.approx(r["new_tokens"] - 3)
    assert r["decode_tokens_per_sec_per_sequence"] * 3 == pytest.approx(r["decode_tokens_per_sec"])
    assert r["time_to_first_token_seconds"] >= r["prefill_seconds"] > 0
    assert r["kv_cache_bytes_allocated"] == r["kv_cache_bytes_formula"] == 2 * 2 * 3 * 4 * (7 + 20) * 8 * 4
    assert 0 < r["kv_cache_bytes_used"] < r["kv_cache_bytes_allocated"]
    out, err = capsys.readouterr()
    assert out == "The cat" + "\n\n---------------\nThe cat".join(r["texts"]) + "\n"
    lines = err.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        "prefill",
        "decode",
        "KV",
        "machine",
    ] and "out/tiny" in lines[0]
    assert f"{r['kv_cache_bytes_mha']:,}" in err and f"{r['decode_tokens_per_sec']:,.0f} tokens/s" in err
    assert list(tmp_path.iterdir()) == [path]


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_bytes_of_each_kind_in_the_report(attention, dtype, here, capsys):
    run = saved_variant(here, attention, attention=attention)
    r = sample.main(
        [f"--out_dir={run}", "--prompt=The", "--max_new_tokens=9", "--num_samples=2", f"--dtype={dtype}"]
    )
    heads, size = {"mha": 4, "gqa": 2, "mqa": 1}[attention], {"float32": 4, "bfloat16": 2}[dtype]
    assert (r["attention"], r["dtype"], r["n_kv_head"]) == (attention, dtype, heads)
    assert (
        r["kv_cache_bytes_allocated"] == r["kv_cache_bytes_formula"] == 2 * 2 * 2 * heads * (3 + 9) * 8 * size
    )
    assert r["kv_cache_bytes_mha"] * heads == r["kv_cache_bytes_formula"] * 4  # mqa: exactly 1 / n_head
    config = load_checkpoint(Path(run)).model.config
    assert r["kv_cache_bytes_mha"] == kv_cache_bytes(as_mha(config), 12, getattr(torch, dtype), 2)
    assert dtype in capsys.readouterr().err


def test_a_bfloat16_checkpoint_is_cast_to_what_is_asked_for_and_printed_PLT_5(here, capsys):
    run = saved_variant(here, "bf16", torch.bfloat16)
    r = sample.main([f"--out_dir={run}", "--prompt=The", "--max_new_tokens=3", "--device=cpu"])
    assert r["dtype"] == "float32" and "cpu, float32" in capsys.readouterr().err


def test_the_newest_run_or_the_one_asked_for(here, capsys):
    newest = sample.main(["--prompt=The", "--max_new_tokens=5"])
    for out_dir in ("out/tiny", "out/tiny/checkpoints/step-000020"):
        assert (
            sample.main([f"--out_dir={out_dir}", "--prompt=The", "--max_new_tokens=5"])["texts"]
            == newest["texts"]
        )


def test_the_cache_is_one_flag_KVC_18(here, capsys):
    common = ["--prompt=The cat", "--max_new_tokens=80", "--context_end=refill", "--num_samples=8"]
    on = sample.main([*common, "--kv_cache"])
    out_on, err_on = capsys.readouterr()
    off = sample.main([*common, "--no_kv_cache"])
    out_off, err_off = capsys.readouterr()
    assert on["texts"] == off["texts"] and out_on == out_off and max(map(len, on["texts"])) == 80
    assert (on["kv_cache"], off["kv_cache"]) == (True, False) and on["refills"] == off["refills"] > 0
    assert off["kv_cache_bytes_allocated"] == off["kv_cache_bytes_used"] == 0 < on["kv_cache_bytes_used"]
    assert on["kv_cache_bytes_allocated"] == on["kv_cache_bytes_formula"] == off["kv_cache_bytes_formula"]
    assert "KV cache   off" in err_off and "bytes allocated" in err_on
    assert on["decode_tokens_per_sec"] > 0 and off["decode_tokens_per_sec"] > 0


def test_streamed_output_equals_the_plain_one_and_is_flushed_per_token_SMP_14(here, monkeypatch, capsys):
    written = []
    recorder = SimpleNamespace(write=lambda piece: written.append(piece), flush=lambda: written.append(None))
    options = ["--prompt=The cat", "--max_new_tokens=20", "--num_samples=2"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", recorder)
        r = sample.main([*options, "--stream"])
    pieces = ["The cat", *r["texts"][0], "\n", f"\n---------------\nThe cat{r['texts'][1]}\n"]
    assert written == [x for piece in pieces for x in (piece, None)]
    sample.main([*options, "--no_stream"])
    assert capsys.readouterr().out == "".join(pieces)


def test_prompts_arrive_whole_CFG_1_CFG_5(here, tmp_path, capsys):
    run = str(
        save_checkpoint(
            tmp_path, 1, tiny_model(vocab_size=257), bpe_tokenizer([], 256).to_dict(), {}
        ).parents[1]
    )
    few = [f"--out_dir={run}", "--temperature=1", "--max_new_tokens=1e0", "--top_k=4"]
    for prompt in ("1+1=", "123", "007", "True", "--x", "a=b=c", "naïve\r\n😀", "None", EOT):
        assert sample.main([*few, f"--prompt={prompt}"])["prompt_tokens"] == len(prompt.encode("utf-8"))
        assert capsys.readouterr().out.startswith(prompt)
    assert sample.main([*few, "--prompt", "1+1="])["prompt_tokens"] == 4
    assert sample.main([*few, "--top_k=none", "--prompt=x"])["prompt_tokens"] == 1  # CFG-2
    assert sample.main([*few, f"--prompt=x{EOT}", "--allow_special"])["prompt_tokens"] == 2  # DAT-6
    assert sample.main([*few, "--prompt="])["prompt_tokens"] == 1  # the end-of-text id: a new document


def test_an_end_of_text_marker_in_the_prompt_is_text_unless_asked_DAT_6(here, capsys):
    plain = sample.main([f"--prompt=it {EOT}", "--max_new_tokens=0"])
    special = sample.main([f"--prompt=it {EOT}", "--max_new_tokens=0", "--allow_special"])
    assert (plain["prompt_tokens"], special["prompt_tokens"]) == (3 + len(EOT), 4)
    assert plain["new_tokens"] == 0 and plain["texts"] == [""]


@pytest.mark.parametrize("data", ["The cat\n— naïve\n", "The", ""])
def test_a_prompt_from_a_file_and_from_standard_input(data, here, tmp_path, monkeypatch, capsys):
    (tmp_path / "prompt.txt").write_bytes(data.encode("utf-8"))
    expected = sample.main([f"--prompt={data}", "--max_new_tokens=10"])
    out = capsys.readouterr().out
    assert out.startswith(data) and expected["prompt_tokens"] == max(1, len(data))
    assert (
        sample.main([f"--prompt_file={tmp_path / 'prompt.txt'}", "--max_new_tokens=10"])["texts"]
        == expected["texts"]
    )
    assert capsys.readouterr().out == out
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data.encode("utf-8"))))
    assert sample.main(["--prompt_file=-", "--max_new_tokens=10"])["texts"] == expected["texts"]


def test_stop_in_the_output(here, capsys):
    whole = sample.main(["--prompt=The", "--max_new_tokens=40", "--no_stream"])["texts"][0]
    stop = whole[10:12]
    capsys.readouterr()
    r = sample.main(["--prompt=The", "--max_new_tokens=40", f"--stop={stop}"])
    assert r["texts"] == [whole.split(stop)[0]] and r["new_tokens"] == whole.index(stop) + 2
    assert capsys.readouterr().out == f"The{r['texts'][0]}\n"


def test_help_lists_each_option_with_type_default_and_a_line_CFG_6(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        sample.main(["--help"])
    assert ended.value.code == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    text = " ".join(lines)
    for name, value in configuration.flatten(SampleConfig()).items():
        assert f"--{name}" in text, name
        if value is not None and name != "prompt":
            assert f"(default: {value})" in text, name
    assert not [line for line in lines if line.startswith("(default:")]  # no word about it
    assert (
        "0 always takes the likeliest" in text and "1 draws from the model's own probabilities" in text
    )  # SMP-1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "temperature=-1"),
        (["--temperature=nan"], "--temperature takes finite float"),
        (["--top_p=1.5"], r"top_p=1\.5: must be between 0 and 1"),
        (["--top_p=-0.5"], r"top_p=-0\.5"),
        (["--min_p=7"], "min_p=7"),
        (["--top_k=-3"], "top_k=-3"),
        (["--top_k=abc"], "--top_k takes int"),
        (["--repetition_penalty=0"], "repetition_penalty=0"),
        (["--num_samples=0"], "num_samples=0: must be at least 1"),
        (["--max_new_tokens=-1"], "max_new_tokens=-1"),
        (["--stop="], "stop='': an empty string"),
        (["--context_end=slide"], "error, stop, refill"),
        (["--temprature=1"], "did you mean temperature"),
        (["--prompt=" + "The cat " * 9], "the prompt has 72 tokens and the context block_size=64: no room"),
        (["--prompt=The", "--max_new_tokens=62"], "max_new_tokens=62, .* block_size=64: room for 61"),
        (["--prompt=Hello%"], r"'H' \(U\+0048\).*first at position 0"),
        (["--prompt_file=missing.txt"], "No such file"),
        (["--prompt_file=out"], "Is a directory"),
        (["--prompt_file=binary"], "--prompt_file=binary: not UTF-8 text"),
        (["--prompt_file=zeros"], "--prompt_file=zeros: binary, not text"),
        (["--out_dir=nowhere"], "no checkpoint in nowhere: there is no such folder"),
        (["--out_dir=notes.txt"], "no checkpoint in notes.txt: there is no such folder"),
        (["--out_dir=foreign"], "ckpt.pt, not ours"),
        (["--out_dir=empty"], "no checkpoint in empty: nothing was saved there"),
        (["--device=cpu", "--dtype=float16"], "--dtype=float16 needs a GPU"),
        (
            ["--report=missing/report.json"],
            "--report=missing/report.json: can't write in missing: No such file",
        ),
        (["--report=notes.txt/report.json"], "--report=notes.txt/report.json: can't write in notes.txt"),
        (["--report=out"], "--report=out: that is a folder"),
        (["--report=/dev/null"], "--report=/dev/null: that is a folder or a device"),
    ],
)
def test_bad_input_is_one_line_and_no_text_comes_first_DAT_10(options, message, here, capsys, monkeypatch):
    (here / "binary").write_bytes(b"ab\xff\xfe")
    (here / "zeros").write_bytes(b"ab\0\0")
    (here / "empty").mkdir(exist_ok=True)
    (here / "foreign").mkdir(exist_ok=True)
    (here / "foreign" / "ckpt.pt").write_bytes(b"PK")
    before = sorted(here.rglob("*"))
    if not any(option.startswith(("--prompt", "--max_new")) for option in options):
        options = ["--prompt=The", "--max_new_tokens=5", *options]
    monkeypatch.setattr(sys, "argv", ["sample.py", *options])
    with pytest.raises(SystemExit) as ended:
        configuration.run_main(sample.main, "sample.py")
    out, err = capsys.readouterr()
    *about, line = err.splitlines()
    assert ended.value.code == 1 and line.startswith("sample.py: error: ")
    assert out == "" and len(about) <= 1  # at most the name of the run
    with pytest.raises((ValueError, OSError), match=message):
        sample.main(options)
    assert sorted(here.rglob("*")) == before


def test_a_full_disk_or_a_folder_without_permission_is_found_before_the_work(here, monkeypatch):
    def refuse(**options):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(sample.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(sample, "generate", lambda *args, **options: pytest.fail("it went to work"))
    with pytest.raises(ValueError, match=r"--report=r\.json: can't write in \.: Permission denied"):
        sample.main(["--report=r.json", "--prompt=The", "--max_new_tokens=5"])


def test_a_report_is_whole_or_as_it_was(here, tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("before", encoding="utf-8")

    def full(self, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        sample.main([f"--report={path}", "--prompt=The", "--max_new_tokens=5"])
    assert path.read_text(encoding="utf-8") == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_refused(name, damage, here):
    run = Path(saved_variant(here, f"{damage}-{name}"))
    file = run / "checkpoints/step-000001" / name
    data = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"truncated|missing|not readable|no checkpoint") as error:
        sample.main([f"--out_dir={run}", "--prompt=The", "--max_new_tokens=5"])
    assert "\n" not in str(error.value) and run.name in str(error.value)


def test_no_run_to_sample_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sample.py", "--prompt=The"])
    with pytest.raises(SystemExit) as ended:
        configuration.run_main(sample.main, "sample.py")
    assert ended.value.code == 1
    hint = "train one first, with: python train.py config/small.py"
    assert capsys.readouterr() == ("", f"sample.py: error: no run to sample from in out/: {hint}\n")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_checkpoint_with_a_weight_that_is_no_number_is_refused_SMP_10(bad, here, tmp_path):
    loaded = load_checkpoint(here / "out/tiny")
    with torch.no_grad():  # a query: attention on a CPU may take it for 0, and the scores look sound
        loaded.model.transformer["h"][0].attn.c_attn.weight[0, 0] = bad
    run = save_checkpoint(tmp_path, 1, loaded.model, loaded.tokenizer, {})
    with pytest.raises(ValueError, match=r"step-000001: some weights are not finite.*earlier checkpoint"):
        sample.main([f"--out_dir={run}", "--prompt=The"])


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(here, tmp_path):
    tokenizer = load_checkpoint(here / "out/tiny").tokenizer
    run = save_checkpoint(tmp_path, 1, tiny_model(vocab_size=20), tokenizer, {})
    with pytest.raises(ValueError, match=r"its tokenizer has \d+ ids, its model only 20"):
        sample.main([f"--out_dir={run}", "--prompt=The"])


def test_an_old_torch_is_refused_PLT_9(here, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    with pytest.raises(ValueError, match=r"PyTorch 2\.4\.1 is too old: 2\.13"):
        sample.main(["--prompt=The"])


# --- as a process of its own


WATCHER = """
import sys
def watch(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise AssertionError(event)
sys.addaudithook(watch)
import torch
import sample, train
def cuda(*args, **options):
    raise AssertionError("a CUDA call")
torch.cuda.synchronize = torch.cuda.is_bf16_supported = cuda
torch.cuda.init = torch.cuda.max_memory_allocated = cuda
import warnings
warnings.simplefilter("error")
options = ["--prompt_file=-", "--max_new_tokens=30", "--out_dir=out/tiny", "--temperature=1.3"]
r = sample.main([*options, "--device=cpu"])
print(ascii(r["texts"][0]))
print(sorted({"rustbpe", "datasets", "wandb", "requests", "huggingface_hub", "tyro"} & set(sys.modules)))
"""


def start(home: Path, *command: str, stdout: int = subprocess.PIPE) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "ascii"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=home,
        env=env,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )


def test_as_a_program_DAT_8_CFG_12_SMP_14(home):
    nobody, pipe = os.pipe()
    os.close(nobody)  # as after `| head`
    left = start(home, str(ROOT / "sample.py"), "--prompt=The", "--max_new_tokens=30", stdout=pipe)
    watched = start(home, "-c", WATCHER)
    os.close(pipe)
    prompt = "A naïve cat —"
    out, err = (text.decode("ascii") for text in watched.communicate(prompt.encode("utf-8"), timeout=120))
    # no network, no CUDA, no library for byte pairs; characters that the terminal lacks are a ?
    assert watched.returncode == 0, err
    shown, text, imported = out.rstrip("\n").rsplit("\n", 2)
    text = eval(text)
    assert shown == (prompt + text).encode("ascii", errors="replace").decode("ascii") and imported == "[]"
    # a reader who leaves is no error
    _, err = left.communicate(timeout=120)
    assert left.returncode == 141
    assert not any(word in err for word in (b"Traceback", b"rror", b"ignored"))
