"""Sample from a trained GPT: python sample.py --prompt "def read"

Here are the options, the prompt and the report; `generation.py` does the work.
"""

import io
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import config as configuration
from checkpoint import load_checkpoint, newest_run
from data.tokenizer import EOT, Tokenizer
from device import DTYPES, check_torch, pick_device, pick_dtype, pick_generation_dtype
from generation import Generation, Sampling, fit_context, generate
from model import GPT, GPTConfig, as_mha, estimate_n_params, kv_cache_bytes
from quantize import quantize_weights
from report import sampling_summary
from tracking import write_json

CACHE_DTYPES = {**DTYPES, "int8": torch.int8}  # auto is none of them


@dataclass
class SampleConfig:
    """One call of sample.py."""

    prompt: str = "\n"  # text to continue; "" begins a new document
    prompt_file: str | None = None  # read the prompt from this file instead; - is standard input
    allow_special: bool = False  # read <|endoftext|> in the prompt as the end-of-text id, not as plain text
    out_dir: str | None = None  # the run, or one of its checkpoints; none takes the newest run under out/
    checkpoint: Literal["last", "best"] = "last"  # the newest, or the best of the evaluations on the way

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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of weights and activations
    compile: bool = False  # torch.compile the decode step, once for all lengths; it pays on a GPU
    weights: Literal["plain", "int8"] = "plain"  # int8: linear layers in 8 bits, half the bytes to read
    cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"  # auto takes dtype

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"num_samples={self.num_samples}: must be at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must not be negative")
        if self.stop == "":
            raise ValueError("stop='': an empty string would end every text at once; leave it out")


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
    config, dtype = model.config, model.dtype
    n_tokens = min(g.prompt_tokens + c.max_new_tokens, config.block_size)
    cache_dtype = CACHE_DTYPES.get(c.cache_dtype, dtype)
    formula, mha = (
        kv_cache_bytes(shape, n_tokens, cache_dtype, c.num_samples) for shape in (config, as_mha(config))
    )
    decode_rate = g.decode_tokens / g.decode_seconds if g.decode_tokens else None
    return {
        "attention": config.attention,
        "n_head": config.n_head,
        "n_kv_head": config.n_kv_head,
        "prompt_tokens": g.prompt_tokens,
        "new_tokens": g.new_tokens,
        "num_samples": c.num_samples,
        "dtype": str(dtype).removeprefix("torch."),
        "cache_dtype": str(cache_dtype).removeprefix("torch."),
        "weights": c.weights,
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
        "kv_cache_bytes_formula": formula,
        "kv_cache_bytes_mha": mha,
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

    def choose_dtype(config: GPTConfig) -> torch.dtype:
        return pick_generation_dtype(c.dtype, device, estimate_n_params(config)["total"])

    pick_dtype(c.dtype, device)  # refuses what the device can't do before anything is read
    if c.report:
        check_report(Path(c.report))
    run = Path(c.out_dir) if c.out_dir else newest_run()
    loaded = load_checkpoint(run, device, choose_dtype, c.checkpoint)
    tokenizer = Tokenizer.from_dict(loaded.tokenizer)
    if tokenizer.vocab_size > loaded.model.config.vocab_size:
        raise ValueError(
            f"{loaded.path}: its tokenizer has {tokenizer.vocab_size} ids, its model only "
            f"{loaded.model.config.vocab_size}: they do not belong together"
        )
    if not all(bool(p.isfinite().all()) for p in loaded.model.parameters()):
        # said here, since PyTorch's fast attention on a CPU takes a NaN for 0: the scores need not show it
        raise ValueError(
            f"{loaded.path}: some weights are not finite (NaN or inf) in {loaded.model.dtype}: its training "
            "diverged, or they need --dtype=float32; give an earlier checkpoint with --out_dir"
        )
    prompt = read_prompt(c)
    ids = tokenizer.encode(prompt or EOT, allow_eot=c.allow_special or not prompt)
    if c.weights == "int8":
        quantize_weights(loaded.model)
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
        [ids] * c.num_samples,
        max_new_tokens=c.max_new_tokens,
        sampling=c.sampling,
        seed=c.seed,
        stop=c.stop,
        kv_cache=c.kv_cache,
        cache_dtype=CACHE_DTYPES.get(c.cache_dtype),
        context_end=c.context_end,
        decoder=torch.compile(loaded.model, dynamic=True) if c.compile else None,
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
