"""Prompts of unequal length in one batch: no row's text changes, and no row pays for another."""

import pytest
import torch
from conftest import KINDS, POSITIONS, tiny_model

from data.tokenizer import char_tokenizer
from generation import Sampling, generate, pad_left

TOKENIZER = char_tokenizer(["".join(map(chr, range(32, 92)))])  # 60 characters and the end-of-text id
GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11], [30, 31, 32, 33, 34]]


def model_of(**shape):
    """A model that speaks the tokenizer's 61 ids; untied, since tied ones repeat themselves."""
    return tiny_model(0, vocab_size=TOKENIZER.vocab_size, tie_weights=False, **shape).eval()


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kv_cache", [True, False])
@pytest.mark.parametrize("n_new,context_end", [(12, "error"), (90, "refill"), (90, "stop")])
def test_each_row_says_what_it_says_alone(attention, position, kv_cache, n_new, context_end):
    # context 32: 90 new tokens go past its end again and again, in each row at a step of its own
    model = model_of(attention=attention, position=position)
    options = {"max_new_tokens": n_new, "sampling": GREEDY, "context_end": context_end, "kv_cache": kv_cache}
    together = generate(model, TOKENIZER, PROMPTS, **options)
    alone = [generate(model, TOKENIZER, [prompt], **options) for prompt in PROMPTS]
    assert together.token_ids == [one.token_ids[0] for one in alone]
    assert together.texts == [one.texts[0] for one in alone]
    assert together.refills == sum(one.refills for one in alone)
    assert together.new_tokens == sum(one.new_tokens for one in alone)
    assert together.prompt_tokens == sum(map(len, PROMPTS))


def test_a_drawn_row_depends_on_its_own_number_only():
    model = model_of(attention="gqa")
    together = generate(model, TOKENIZER, PROMPTS, max_new_tokens=15, seed=3)
    for row, prompt in enumerate(PROMPTS):
        same = generate(model, TOKENIZER, [prompt] * (row + 1), max_new_tokens=15, seed=3)
        assert together.token_ids[row] == same.token_ids[row]


def test_rows_that_end_leave_the_batch_and_the_rest_goes_on_unchanged():
    model = model_of()
    plain = generate(model, TOKENIZER, PROMPTS, max_new_tokens=20, sampling=GREEDY)
    stop = plain.texts[1][4:6]  # the longest prompt's row ends first, and its column of padding goes unused
    stopped = generate(model, TOKENIZER, PROMPTS, max_new_tokens=20, sampling=GREEDY, stop=stop)
    assert len(stopped.token_ids[1]) <= 6
    for before, after in zip(plain.texts, stopped.texts, strict=True):
        assert after == before.split(stop)[0]
    sizes = []
    hook = model.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[0]))
    generate(model, TOKENIZER, PROMPTS, max_new_tokens=20, sampling=GREEDY, stop=stop)
    hook.remove()
    assert sizes[-1] < len(PROMPTS)  # the last steps run without the rows that have ended


def test_equal_prompts_are_read_once():
    model, seen = model_of(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    out = generate(model, TOKENIZER, [PROMPTS[1]] * 5, max_new_tokens=3)
    assert (1, 9) in seen and (5, 1) in seen and (5, 9) not in seen
    assert out.prompt_tokens == 9


def test_padding_is_on_the_left_and_none_where_rows_are_equal():
    idx, pad = pad_left([[1, 2, 3], [4]], torch.device("cpu"))
    assert idx.tolist() == [[1, 2, 3], [0, 0, 4]] and pad.tolist() == [0, 2]
    assert pad_left([[1, 2], [3, 4]], torch.device("cpu"))[1] is None
