"""Continue prompts: `prefill` reads them, `decode` adds one token per row, `choose` draws it.

`generate` puts them together with the rules of when a row ends and what happens at the end of the context,
and with the clock.
"""

import codecs
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from device import matrix_vector_products, synchronize
from model import GPT, KVCache


@dataclass
class Sampling:
    """How the next token is drawn from the model's scores; applied in this order, in float32."""

    repetition_penalty: float = 1.0  # divides scores above 0 of tokens already there, multiplies others
    temperature: float = 0.8  # 0 always takes the likeliest token; 1 draws from the model's own probabilities
    top_k: int | None = None  # draw from the k likeliest tokens only; none or 0 is off
    top_p: float = 1.0  # draw from the fewest tokens whose probabilities add up to this; 1 is off
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one; 0 is off

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # nor NaN
            raise ValueError(
                f"temperature={self.temperature}: must be 0 (always the likeliest token) or more"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be positive, or 0 for off")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0; 1 is off")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be between 0 and 1")


def choose(logits: Tensor, u: Tensor, s: Sampling, seen: Tensor | None = None) -> Tensor:
    """Draw the next token of each row: scores (B, V) and a uniform number in [0, 1) per row -> ids (B,).

    `seen`: (B, V) bool, the tokens already there, for the repetition penalty (Keskar et al. 2019). The draw
    inverts the cumulative distribution, so a row's text depends on its own numbers only, not on its
    neighbours in the batch. Errors: ValueError where a row's scores are NaN or infinite.
    """
    logits = logits.float()
    if seen is not None and s.repetition_penalty != 1.0:
        penalised = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
        logits = torch.where(seen, penalised, logits)
    if not torch.isfinite(logits.amax(dim=-1)).all():  # the maximum of a row with a NaN is NaN
        raise ValueError(
            "the model's scores are not finite (NaN or inf): the checkpoint has diverged, or its dtype "
            "overflows; try --dtype=float32 or an earlier checkpoint"
        )
    if s.temperature == 0:
        return logits.argmax(dim=-1)
    ids = None
    if s.top_k or s.top_p < 1:  # sorted from the likeliest down, so that what is kept is a prefix
        logits, ids = logits.topk(min(s.top_k or logits.shape[-1], logits.shape[-1]), dim=-1)
    # The likeliest is set to 0 first: dividing by a tiny temperature then can't overflow to inf - inf. A
    # temperature that float32 takes for 0 or inf would still make 0 / 0 or inf / inf.
    temperature = min(max(s.temperature, 1e-30), 1e30)
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    if s.top_p < 1:  # a token is kept while those before it have less than top_p; the first is kept always
        before = probs.cumsum(dim=-1) - probs
        probs = probs.masked_fill((before >= s.top_p) & (before > 0), 0.0)
    if s.min_p > 0:
        probs = probs.masked_fill(probs < s.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    cdf = probs.double().cumsum(dim=-1)
    # the first index whose cumulative mass is above u: never one of mass 0
    index = torch.searchsorted(cdf, u.to(cdf).unsqueeze(-1) * cdf[:, -1:], right=True).clamp(
        max=cdf.shape[-1] - 1
    )
    return (index if ids is None else ids.gather(-1, index)).squeeze(-1)


class TextStream:
    """Ids to text, bit by bit: holds back bytes of a split character and what may begin the stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None) -> None:
        self.tokenizer, self.stop, self.text, self.stopped = tokenizer, stop, "", False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def push(self, ids: list[int], final: bool = False) -> str:
        """Take new ids and return the text that is now certain; nothing more after the stop string."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(self.tokenizer.decode_bytes(ids), final)
        keep = 0
        if self.stop:
            at = self._held.find(self.stop)
            if at >= 0:
                self._held, self.stopped = self._held[:at], True
            elif not final:
                keep = next(
                    (n for n in range(len(self.stop) - 1, 0, -1) if self._held.endswith(self.stop[:n])), 0
                )
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += certain
        return certain


def prefill(model: GPT, idx: Tensor, cache: KVCache | None) -> Tensor:
    """Read prompts (B, T) in one go, fill the cache, return the scores of the token after them, (B, V)."""
    return model(idx, cache=cache, logits_for="last")[0][:, 0]


def decode(model: Any, last: Tensor, cache: KVCache) -> Tensor:
    """Read one more token per row, (B,), and return the scores of the one after it, (B, V).

    `model` may be `torch.compile(model, dynamic=True)`: one compilation then serves every length.
    """
    if len(last) == 1:
        with matrix_vector_products(last.device, model.dtype):
            return model(last[:, None], cache=cache, logits_for="last")[0][:, 0]
    return model(last[:, None], cache=cache, logits_for="last")[0][:, 0]


@dataclass
class Generation:
    """What `generate` did. Seconds end when the device is done; the first, slower call is not in them."""

    token_ids: list[list[int]]  # new ids per row, without the end-of-text id; with those of a stop string
    texts: list[str]  # new text per row, without the stop string
    prompt_tokens: int = 0  # read by prefill; a prompt that all rows share is read once
    new_tokens: int = 0  # drawn, in all rows, end-of-text ids included
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0  # from the start of prefill to the first token in hand
    decode_tokens: int = 0  # drawn after the first of each row
    decode_seconds: float = 0.0
    refills: int = 0  # times that rows went on from the last half of their context; in decode_seconds
    cache_bytes_allocated: int = 0
    cache_bytes_used: int = 0


@torch.inference_mode()
def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    *,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: str | None = None,
    kv_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    context_end: str = "error",
    decoder: Callable[..., Any] | None = None,
    show: Callable[[str], None] | None = None,
) -> Generation:
    """Continue prompts of any lengths in one batch, one row each; a row's text is what it would be alone.

    A prompt that all rows share is read once; its keys and values then serve all of them. A row ends at the
    end-of-text id, at `stop`, or after `max_new_tokens`, and then leaves the batch. At the end of the
    context: see `fit_context`. `cache_dtype`: of the cache, none takes the weights'. `decoder`: the model
    compiled for `decode`, if any. `show` gets the first row's text as it becomes certain. Errors: ValueError
    for a prompt that is empty or too long.
    """
    s, device, block_size = sampling or Sampling(), next(model.parameters()).device, model.config.block_size
    fitted = [fit_context(prompt, max_new_tokens, block_size, context_end) for prompt in prompts]
    sight, limit = [list(prompt) for prompt, _ in fitted], [n for _, n in fitted]  # what each row attends to
    shared = all(prompt == sight[0] for prompt in sight)
    out = Generation([[] for _ in prompts], [""] * len(prompts))
    out.prompt_tokens = len(sight[0]) if shared else sum(map(len, sight))
    if not any(limit):
        return out
    # draws on an Apple GPU have returned ids that do not exist, and it has no float64
    draw_on = torch.device("cpu") if device.type == "mps" else device
    uniform = uniform_numbers(seed, len(prompts), max(limit)).to(draw_on)
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    seen = None
    if s.repetition_penalty != 1.0:
        seen = torch.zeros(len(prompts), tokenizer.vocab_size, dtype=torch.bool, device=draw_on)
        for row, prompt in enumerate(sight):
            seen[row, prompt] = True

    def read(rows: list[int]) -> tuple[Tensor, KVCache | None]:
        """Prefill what the rows have in sight: the scores of the next token, and the cache to go on with."""
        idx, pad = pad_left([sight[row] for row in rows], device)
        if not kv_cache and pad is None:
            return prefill(model, idx, None), None
        length = idx.shape[1]
        if kv_cache:
            length = min(length + max(limit[row] - len(out.token_ids[row]) for row in rows), block_size)
        cache = KVCache(model.config, len(rows), length, cache_dtype or model.dtype, device, pad)
        logits = prefill(model, idx, cache)
        return logits, cache if kv_cache else None

    step_model = model if decoder is None else decoder  # no `or`: a compiled module has no truth value
    warm_up(model, step_model, len(prompts), cache_dtype or model.dtype, device)
    synchronize(device)
    begin = time.perf_counter()
    logits, cache = read([0] if shared else list(range(len(sight))))
    synchronize(device)
    out.prefill_seconds = time.perf_counter() - begin
    if shared and len(sight) > 1:
        logits, cache = logits.expand(len(sight), -1), cache.repeat(len(sight)) if cache else None
    out.cache_bytes_allocated = cache.nbytes if cache else 0

    rows, ids = list(range(len(sight))), torch.empty(0)  # the rows still going, in the order of the batch
    for step in range(max(limit)):
        if step > 0 and cache is not None and cache.length < cache.max_len:
            logits = decode(step_model, ids, cache)
        elif step > 0:  # no cache, or no room in it: read again
            for row in rows:
                if len(sight[row]) > block_size:  # go on from the last half, positions from 0 again
                    sight[row], out.refills = sight[row][-max(1, block_size // 2) :], out.refills + 1
            logits, cache = read(rows)
        scores = logits[:, : tokenizer.vocab_size].to(draw_on)  # padding in the table is no token
        ids = choose(scores, uniform[rows, step], s, seen[rows] if seen is not None else None)
        if seen is not None:
            seen[rows, ids] = True
        ids = ids.to(device)
        if step == 0:
            synchronize(device)
            out.first_token_seconds = time.perf_counter() - begin
        if cache is not None:
            out.cache_bytes_used = max(out.cache_bytes_used, cache.length * cache.nbytes // cache.max_len)
        going = []
        for at, (row, token) in enumerate(zip(rows, ids.tolist(), strict=True)):
            out.new_tokens += 1
            if token == tokenizer.eot_id:
                continue
            out.token_ids[row].append(token)
            sight[row].append(token)
            piece = streams[row].push([token])
            if show and row == 0 and piece:
                show(piece)
            if not streams[row].stopped and len(out.token_ids[row]) < limit[row]:
                going.append(at)
        if not going:
            break
        if len(going) < len(rows):  # rows that have ended leave the batch
            ids, rows = ids[going], [rows[at] for at in going]
            if cache is not None:
                cache.keep(going)
    synchronize(device)
    out.decode_seconds = time.perf_counter() - begin - out.first_token_seconds
    out.decode_tokens = out.new_tokens - len(prompts)
    for row, stream in enumerate(streams):
        piece = stream.push([], final=True)
        if show and row == 0 and piece:
            show(piece)
        out.texts[row] = stream.text
    return out


def pad_left(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Rows of unequal length as one batch (B, T), and how many of each row's first ids are padding, (B,), or
    None where none are. Padding goes to the left so that all rows have their next token in the same
    column."""
    T = max(map(len, rows))
    idx = torch.tensor([[0] * (T - len(row)) + row for row in rows], device=device)
    pad = torch.tensor([T - len(row) for row in rows], device=device)
    return idx, pad if bool(pad.any()) else None


def uniform_numbers(seed: int, rows: int, n: int) -> Tensor:
    """Numbers in [0, 1), (rows, n) float64; row i depends on (seed, i) alone, the first ones not on n.

    From Philox, which takes both as its key: PyTorch's generator on a CPU looks at 32 bits of a seed only.
    """
    keys = [np.array([seed % 2**64, row], dtype=np.uint64) for row in range(rows)]
    raw = np.stack([np.random.Philox(key=key).random_raw(n) for key in keys])
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53)


def fit_context(
    prompt: list[int], max_new_tokens: int, block_size: int, context_end: str
) -> tuple[list[int], int]:
    """The prompt and number of new tokens that the context allows, by the one rule, cache or not:

    error   prompt + new tokens must fit into block_size, else ValueError
    stop    generation ends when the context is full; a prompt that fills it is an error
    refill  when the context is full, its last half is read again as a new prompt; a long prompt is cut in
    the same way
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token")
    room = block_size - len(prompt)
    if context_end == "refill":
        return (prompt if room >= 0 else prompt[-max(1, block_size // 2) :]), max_new_tokens
    if room < 0 or (max_new_tokens and room == 0):
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and the context block_size={block_size}: no room to go on; "
            "shorten it, or use --context_end=refill"
        )
    if context_end == "error" and max_new_tokens > room:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, max_new_tokens={max_new_tokens}, and the context "
            f"block_size={block_size}: room for {room}; ask for fewer, or use --context_end=refill or stop"
        )
    return prompt, min(max_new_tokens, room)


def warm_up(
    model: GPT, decoder: Any, batch_size: int, cache_dtype: torch.dtype, device: torch.device
) -> None:
    """A short prefill and two decode steps, their results dropped: first calls are the slow ones, and
    a decoder that is to be compiled is compiled here."""
    length = min(3, model.config.block_size)
    cache = KVCache(model.config, batch_size, length, cache_dtype, device)
    token = torch.zeros(batch_size, dtype=torch.long, device=device)
    prefill(model, token[:, None], cache)
    for _ in range(length - 1):
        decode(decoder, token, cache)
