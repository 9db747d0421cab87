"""Sample from a trained GPT: python sample.py --prompt "def read"

`prefill` reads the prompt, `decode` adds one token per row, `generate` puts the two together with the sampler
(`choose`), the stop rules and the clock. Everything else is options and the report.
"""

import codecs
import io
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import config as configuration
from checkpoint import load_checkpoint, newest_run
from data.tokenizer import EOT, Tokenizer
from device import check_torch, pick_device, pick_dtype, synchronize
from model import GPT, KVCache, as_mha, kv_cache_bytes
from report import sampling_summary
from tracking import write_json


@dataclass
class Sampling:
    """How the next token is drawn from the model's scores; applied in this order, in float32."""

    repetition_penalty: float = 1.0  # divides scores above 0 of tokens already there, multiplies others
    temperature: float = 0.8  # 0 always takes the likeliest token; 1 draws from the model's own probabilities
    top_k: int | None = None  # draw from the k likeliest tokens only; none or 0 is off
    top_p: float = 1.0  # draw from the fewest tokens whose probabilities add up to this; 1 is off
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest one; 0 is off

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 (always the likeliest token) or more"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be positive, or 0 for off")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: must be above 0; 1 is off")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be between 0 and 1")


@dataclass
class SampleConfig:
    """One call of sample.py."""

    prompt: str = "\n"  # text to continue; "" begins a new document
    prompt_file: str | None = None  # read the prompt from this file instead; - is standard input
    allow_special: bool = False  # read <|endoftext|> in the prompt as the end-of-text id, not as plain text
    out_dir: str | None = None  # the run, or one of its checkpoints; none takes the newest run under out/

    num_samples: int = 1  # texts to draw, in one batch
    max_new_tokens: int | None = None  # tokens to add at most; none takes 200, or what the context has left
    stop: str | None = None  # end a text before this string; a run's own end-of-text id always ends it
    context_end: Literal["error", "stop", "refill"] = "error"  # refuse, stop, or go on from the last half
    seed: int = 0  # sample i depends on (seed, i) alone
    sampling: Sampling = field(default_factory=Sampling)

    kv_cache: bool = True  # keep keys and values, or run the whole text again for each token
    stream: bool = True  # show the first sample as it is drawn
    report: str | None = None  # write the figures, texts and ids to this JSON file

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto takes cuda, then mps, then cpu
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of weights and cache

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: must be at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must not be negative")
        if self.stop == "":
            raise ValueError("stop='': an empty string would end every text at once; leave it out")


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


def decode(model: GPT, last: Tensor, cache: KVCache) -> Tensor:
    """Read one more token per row, (B,), and return the scores of the one after it, (B, V)."""
    return model(last[:, None], cache=cache, logits_for="last")[0][:, 0]


@dataclass
class Generation:
    """What `generate` did. Seconds end when the device is done; the first, slower call is not in them."""

    token_ids: list[list[int]]  # new ids per row, without the end-of-text id; with those of a stop string
    texts: list[str]  # new text per row, without the stop string
    prompt_tokens: int  # read by prefill
    new_tokens: int  # drawn, in all rows, end-of-text ids included
    prefill_seconds: float
    first_token_seconds: float  # from the start of prefill to the first token in hand
    decode_tokens: int  # drawn after the first of each row
    decode_seconds: float
    refills: int  # times the last half of the context was read again; in decode_seconds
    cache_bytes_allocated: int
    cache_bytes_used: int


@torch.inference_mode()
def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    *,
    num_samples: int = 1,
    max_new_tokens: int = 200,
    sampling: Sampling | None = None,
    seed: int = 0,
    stop: str | None = None,
    kv_cache: bool = True,
    context_end: str = "error",
    show: Callable[[str], None] | None = None,
) -> Generation:
    """Continue one prompt `num_samples` times, in one batch.

    The prompt is read once; its keys and values then serve all samples. A row ends at the end-of-text id, at
    `stop`, or after `max_new_tokens`; ended rows leave the batch. At the end of the context: see
    `fit_context`. `show` gets the first row's text as it becomes certain. Errors: ValueError for a prompt
    that is empty or too long.
    """
    s, device, block_size = sampling or Sampling(), next(model.parameters()).device, model.config.block_size
    prompt, max_new_tokens = fit_context(prompt, max_new_tokens, block_size, context_end)
    if max_new_tokens == 0:
        return Generation(
            [[] for _ in range(num_samples)], [""] * num_samples, len(prompt), 0, 0.0, 0.0, 0, 0.0, 0, 0, 0
        )
    # draws on an Apple GPU have returned ids that do not exist, and it has no float64
    draw_on = torch.device("cpu") if device.type == "mps" else device
    uniform = uniform_numbers(seed, num_samples, max_new_tokens).to(draw_on)
    streams = [TextStream(tokenizer, stop) for _ in range(num_samples)]
    token_ids: list[list[int]] = [[] for _ in range(num_samples)]
    seen = None
    if s.repetition_penalty != 1.0:
        seen = torch.zeros(num_samples, tokenizer.vocab_size, dtype=torch.bool, device=draw_on)
        seen[:, prompt] = True

    def new_cache(rows: int) -> KVCache | None:
        weight = model.lm_head.weight
        length = min(len(prompt) + max_new_tokens, block_size)
        return KVCache(model.config, rows, length, weight.dtype, device) if kv_cache else None

    warm_up(model, device)
    text = torch.tensor([prompt], device=device)  # (rows, tokens in sight)
    synchronize(device)
    begin = time.perf_counter()
    cache = new_cache(1)
    logits = prefill(model, text, cache)
    synchronize(device)
    prefill_seconds = time.perf_counter() - begin
    if num_samples > 1:
        text, logits = text.expand(num_samples, -1), logits.expand(num_samples, -1)
        cache = cache.repeat(num_samples) if cache else None
    allocated, used, refills, drawn, first_token_seconds = cache.nbytes if cache else 0, 0, 0, 0, 0.0

    rows = list(range(num_samples))  # the samples still going, in the order of the batch
    for step in range(max_new_tokens):
        if step > 0:
            last = text[:, -1]
            if text.shape[1] > block_size:  # go on from the last half, positions from 0 again
                text, refills = text[:, -max(1, block_size // 2) :], refills + 1
                cache = new_cache(len(rows))
                logits = prefill(model, text, cache)
            else:
                logits = decode(model, last, cache) if cache else prefill(model, text, None)
        scores = logits[:, : tokenizer.vocab_size].to(draw_on)  # padding in the table is no token
        ids = choose(scores, uniform[rows, step], s, seen[rows] if seen is not None else None)
        if seen is not None:
            seen[rows, ids] = True
        drawn += len(rows)
        ids = ids.to(device)
        if step == 0:
            synchronize(device)
            first_token_seconds = time.perf_counter() - begin
        going = []
        for at, (row, token) in enumerate(zip(rows, ids.tolist(), strict=True)):
            if token != tokenizer.eot_id:
                token_ids[row].append(token)
                piece = streams[row].push([token])
                if show and row == 0 and piece:
                    show(piece)
                if not streams[row].stopped:
                    going.append(at)
        if cache:
            used = max(used, cache.length * cache.nbytes // cache.max_len)
        if not going:
            break
        text = torch.cat((text, ids[:, None]), dim=1)
        if len(going) < len(rows):
            text, rows = text[going], [rows[at] for at in going]
            if cache:
                cache.keep(going)
    synchronize(device)
    decode_seconds = time.perf_counter() - begin - first_token_seconds
    for row, stream in enumerate(streams):
        piece = stream.push([], final=True)
        if show and row == 0 and piece:
            show(piece)
    return Generation(
        token_ids,
        [stream.text for stream in streams],
        len(prompt),
        drawn,
        prefill_seconds,
        first_token_seconds,
        drawn - num_samples,
        decode_seconds,
        refills,
        allocated,
        used,
    )


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


def warm_up(model: GPT, device: torch.device) -> None:
    """One short prefill and decode, their results dropped: a process's first call is slower than the rest."""
    cache = KVCache(model.config, 1, min(2, model.config.block_size), model.lm_head.weight.dtype, device)
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    for _ in range(cache.max_len):
        model(token, cache=cache, logits_for="last")


def read_prompt(c: SampleConfig) -> str:
    """The prompt's text, from the option, a file, or standard input, line ends as they are."""
    if c.prompt_file is None:
        return c.prompt
    data = sys.stdin.buffer.read() if c.prompt_file == "-" else Path(c.prompt_file).read_bytes()
    if (at := data.find(b"\0")) >= 0:
        raise ValueError(f"--prompt_file={c.prompt_file}: binary, not text (a zero byte at offset {at})")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt_file={c.prompt_file}: not UTF-8 text (byte {error.start})") from None


def check_report(path: Path) -> None:
    """Refuse a report that can't be written while nothing is lost yet, not after the work (ValueError)."""
    if path.exists() and not path.is_file():
        raise ValueError(f"--report={path}: that is a folder or a device; give the name of a file")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"--report={path}: can't write in {path.parent}: {error.strerror}") from None


def make_report(c: SampleConfig, model: GPT, g: Generation, device: torch.device) -> dict[str, Any]:
    """The figures of one call, as --report writes them: tokens per second, seconds, bytes of the cache."""
    config, dtype = model.config, model.lm_head.weight.dtype
    n_tokens = min(g.prompt_tokens + c.max_new_tokens, config.block_size)
    formula = [kv_cache_bytes(shape, n_tokens, dtype, c.num_samples) for shape in (config, as_mha(config))]
    decode_rate = g.decode_tokens / g.decode_seconds if g.decode_tokens else None
    return {
        "attention": config.attention,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "prompt_tokens": g.prompt_tokens,
        "new_tokens": g.new_tokens,
        "num_samples": c.num_samples,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "kv_cache": c.kv_cache,
        "prefill_tokens_per_sec": g.prompt_tokens / g.prefill_seconds if g.prefill_seconds else None,
        "decode_tokens_per_sec": decode_rate,
        "decode_tokens_per_sec_per_sequence": decode_rate and decode_rate / c.num_samples,
        "time_to_first_token_seconds": g.first_token_seconds,
        "prefill_seconds": g.prefill_seconds,
        "decode_seconds": g.decode_seconds,
        "refills": g.refills,
        "kv_cache_bytes_allocated": g.cache_bytes_allocated,
        "kv_cache_bytes_used": g.cache_bytes_used,
        "kv_cache_bytes_formula": formula[0],
        "kv_cache_bytes_mha": formula[1],
        "texts": g.texts,
        "token_ids": g.token_ids,
    }


def main(argv: list[str]) -> dict[str, Any]:
    """Read the options, load the run, write texts to standard output and figures to standard error."""
    parsed = configuration.parse(
        argv, SampleConfig, prog="sample.py", description="Sample from a trained GPT."
    )
    c = parsed.config
    check_torch()
    device = pick_device(c.device)
    dtype = pick_dtype(c.dtype, device)
    if c.report:
        check_report(Path(c.report))
    loaded = load_checkpoint(Path(c.out_dir) if c.out_dir else newest_run(), device, dtype)
    tokenizer = Tokenizer.from_dict(loaded.tokenizer)
    if tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise ValueError(
            f"{loaded.path}: its tokenizer has {tokenizer.vocab_size} ids, its model only "
            f"{loaded.model.config.vocab_size}: they do not belong together"
        )
    if not all(bool(p.isfinite().all()) for p in loaded.model.parameters()):
        # said here, since PyTorch's fast attention on a CPU takes a NaN for 0: the scores need not show it
        raise ValueError(
            f"{loaded.path}: some weights are not finite (NaN or inf) in {c.dtype}: its training diverged, "
            "or they need --dtype=float32; give an earlier checkpoint with --out_dir"
        )
    prompt = read_prompt(c)
    ids = tokenizer.encode(prompt or EOT, allow_eot=c.allow_special or not prompt)
    if c.max_new_tokens is None:
        room = loaded.model.config.block_size - len(ids)
        c.max_new_tokens = 200 if c.context_end == "refill" else max(1, min(200, room))
    fit_context(ids, c.max_new_tokens, loaded.model.config.block_size, c.context_end)  # refused before a word

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character shows ?, the report all
        sys.stdout.reconfigure(errors="replace")

    def show(piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    print(f"{loaded.path}, {loaded.model.config.attention}", file=sys.stderr)
    if c.stream:
        show(prompt)
    g = generate(
        loaded.model,
        tokenizer,
        ids,
        num_samples=c.num_samples,
        max_new_tokens=c.max_new_tokens,
        sampling=c.sampling,
        seed=c.seed,
        stop=c.stop,
        kv_cache=c.kv_cache,
        context_end=c.context_end,
        show=show if c.stream else None,
    )
    if not c.stream:
        show(prompt + g.texts[0])
    show("\n")
    for text in g.texts[1:]:
        show(f"\n---------------\n{prompt}{text}\n")
    report = make_report(c, loaded.model, g, device)
    if c.report:
        write_json(Path(c.report), {**asdict(c), **report})
    print(sampling_summary(report), file=sys.stderr)
    return report


if __name__ == "__main__":
    configuration.run_main(main, "sample.py")
