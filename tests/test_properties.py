"""Rules that hold for whatever comes in: options, tokenizers, windows, the sampler, checkpoints.

HEADCOUNT_EXAMPLES=1000 in the environment tries more per rule than the few of a quick run; `run` counts them.
"""

import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import fuzz
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from checkpoint import load_checkpoint
from config import flatten, parse
from data.loader import (
    batch_starts,
    eval_batches,
    eval_windows,
    get_batch,
    open_tokens,
    pack_header,
    write_tokens,
)
from data.sources import load_corpus
from data.tokenizer import EOT, Tokenizer, bpe_tokenizer, char_tokenizer, gpt2_tokenizer
from generation import Sampling, choose

EXAMPLES = int(os.environ.get("HEADCOUNT_EXAMPLES", "60"))
SHARED_TIKTOKEN = Path(__file__).resolve().parents[2] / "shared" / "tiktoken"
rule = settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or None where it is refused with a ValueError of one line."""
    try:
        return call()
    except ValueError as error:
        message = str(error)
        assert message and len(message.splitlines()) == 1 and len(message) < 2000, message
        return None


# --- config: presets and flags


@dataclass
class Shape:
    """A part of the options."""

    n_head: int = 4
    n_kv_head: int | None = None
    attention: Literal["mha", "gqa", "mqa"] = "mha"


@dataclass
class Options:
    """Each kind of option."""

    size: int = 3
    rate: float = 1e-3
    words: str = "a"
    place: str | None = None
    limit: int | None = None
    share: float | None = None
    loud: bool = False
    fused: bool | None = None
    kind: Literal["x", "y z"] | None = None
    shape: Shape = field(default_factory=Shape)


INTEGERS = st.integers(1 - 2**63, 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "size": INTEGERS,
    "rate": FLOATS,
    "words": WORDS,
    "place": st.none() | WORDS.filter(lambda text: text not in ("None", "none")),
    "limit": st.none() | INTEGERS,
    "share": st.none() | FLOATS,
    "loud": st.booleans(),
    "fused": st.none() | st.booleans(),
    "kind": st.none() | st.sampled_from(["x", "y z"]),
    "n_head": INTEGERS,
    "n_kv_head": st.none() | INTEGERS,
    "attention": st.sampled_from(["mha", "gqa", "mqa"]),
}
SOME = st.fixed_dictionaries({}, optional=VALUES)
JUNK = st.text(max_size=10)
JUNK |= st.sampled_from(["--", "-h1", "=", "--=", "1e999", "nan", "None", "9" * 5000, "\ud800"])


def read(argv: list[str]) -> Any:
    return parse(argv, Options, prog="x", description="")


def same(a: Any, b: Any) -> bool:
    """Equal, in the same type; -0.0 is not 0.0."""
    return type(a) is type(b) and repr(a) == repr(b)


def written(values: dict[str, Any]) -> str:
    return "".join(f"{key} = {value!r}\n" for key, value in values.items())


@rule
@given(SOME, st.data())
def test_flags_come_back_as_they_were_written(values, data):
    argv = []
    for key, value in values.items():
        name = key.replace("_", data.draw(st.sampled_from("_-")))
        argv.append(f"--{name}={value}")
    found = read(argv)
    flat = flatten(found.config)
    assert found.presets == [] and found.explicit.keys() == values.keys()
    assert all(same(flat[key], value) and same(found.explicit[key], value) for key, value in values.items())
    defaults = flatten(Options())
    assert all(same(flat[key], defaults[key]) for key in defaults.keys() - values.keys())


@rule
@given(st.lists(SOME, max_size=3), SOME)
def test_presets_come_back_and_the_later_wins(presets, flags):
    """Precedence: default < presets in their order < flags."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        names = [f"{n}.py" for n in range(len(presets))]
        for name, values in zip(names, presets, strict=True):
            Path(name).write_text(written(values), encoding="utf-8", newline="")
        found = read([*names, *(f"--{key}={value}" for key, value in flags.items())])
    expected = flatten(Options())
    for values in (*presets, flags):
        expected |= values
    flat = flatten(found.config)
    assert [str(path) for path in found.presets] == names and found.explicit.keys() == flags.keys()
    assert flat.keys() == expected.keys() and all(same(flat[key], expected[key]) for key in flat)


@rule
@given(SOME, SOME)
def test_base_is_a_preset_underneath(under, over):
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("under.py").write_text(written(under), encoding="utf-8", newline="")
        Path("over.py").write_text("base = 'under.py'\n" + written(over), encoding="utf-8", newline="")
        flat = flatten(read(["over.py"]).config)
    expected = flatten(Options()) | under | over
    assert all(same(flat[key], expected[key]) for key in expected)


KEYS = st.sampled_from([*VALUES, "sise", "base", "help", "no-loud", "no_fused", "lr", "shape", ""]) | JUNK


@rule
@given(st.lists(st.tuples(KEYS, st.none() | JUNK | st.integers().map(str) | FLOATS.map(str)), max_size=4))
def test_any_flags_give_right_values_or_one_line(pairs):
    argv = [f"--{key}" if text is None else f"--{key}={text}" for key, text in pairs]
    assume(not {"-h", "--help"} & set(argv))
    found = outcome(lambda: read(argv))
    if found is None:
        return
    o = found.config
    assert (type(o.size), type(o.rate), type(o.words), type(o.loud)) == (int, float, str, bool)
    assert type(o.limit) in (int, type(None)) and type(o.share) in (float, type(None))
    assert o.kind in ("x", "y z", None) and abs(o.size) < 2**63 and math.isfinite(o.rate)
    if any(text is None for _, text in pairs):  # what comes after such a flag may be its value
        return
    last = {key.replace("-", "_"): text for key, text in pairs}
    for key, text in last.items():
        value = found.explicit[key]
        if isinstance(value, bool) or value is None:
            assert text.lower() == str(value).lower()
        elif isinstance(value, str):
            assert value == text
        else:
            assert value == float(text) or value == int(text)


SIGNS = ["+", "-", "*", "/", "//", "%", "**", "and", "<", ","]
TERMS = st.integers(0, 2**64).map(str) | st.sampled_from(["_a", "True", "'a'"])
TERMS |= st.floats(0, allow_nan=False, allow_infinity=False).map(repr)
EXPRESSIONS = st.recursive(
    TERMS,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(SIGNS), inner)
    | inner.map("-{}".format)
    | inner.map("[{}]".format),
    max_leaves=5,
)


@rule
@given(EXPRESSIONS)
def test_arithmetic_is_pythons_own_or_one_line(expression):
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("p.py").write_text(f"_a = 7\nrate = {expression}\n", encoding="utf-8")
        found = outcome(lambda: read(["p.py"]))
    if found is not None:
        value = eval(expression, {"__builtins__": {}}, {"_a": 7})
        assert type(value) in (int, float) and same(found.config.rate, float(value))


PRESETS = st.lists(st.sampled_from(fuzz.LINES), max_size=3).map("\n".join)


@pytest.mark.filterwarnings("ignore:invalid")  # Python's, of escapes and numbers
@rule
@given(st.binary(max_size=60) | PRESETS.map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_preset_gives_options_or_one_line(raw):
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("p.py").write_bytes(raw)
        found = outcome(lambda: read(["p.py"]))
        assert not Path(fuzz.TRAP).exists()
    assert found is None or isinstance(found.config, Options)


# --- tokenizers


SPECIAL = ["\r\n", "\r", "\n", "\t  ", "\0", "\ufeff", "👩\u200d🚀", "💡", "e\u0301", EOT, "<|endoftext|"]
SPECIAL += ["\U0010ffff", "\ud7ff", "\ue000", "\uffff", "it's", "'LL", "1234", "    ", "\u3000", "\u2028"]
TEXT = st.lists(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(SPECIAL), max_size=8
).map("".join)
BPE = {n: bpe_tokenizer(["def f(x):\n    return 'é—💡' + x  # it's 123\n" * 9], n) for n in (256, 300)}


@pytest.fixture(scope="module")
def gpt2():
    if not SHARED_TIKTOKEN.is_dir():
        pytest.skip("no tiktoken cache in ../shared/tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_TIKTOKEN))
        return gpt2_tokenizer()


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """DAT-1, DAT-6: the text comes back, whole or in a batch, as bytes, and through JSON."""
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.eot_id for i in ids)
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode("utf-8")
    assert tokenizer.encode_batch([text, "", text]) == [ids, [], ids]
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode("utf-8"))
    marked = tokenizer.encode(text, allow_eot=True)
    assert marked.count(tokenizer.eot_id) == text.count(EOT) and tokenizer.decode(marked) == text


@rule
@given(TEXT, st.sampled_from([256, 300]))
def test_bpe_round_trip(text, size):
    check_round_trip(BPE[size], text)


@rule
@given(TEXT, TEXT)
def test_char_round_trip(text, more):
    tokenizer = char_tokenizer([text, more, "a"])
    check_round_trip(tokenizer, text)
    assert len(tokenizer.encode(text)) == len(text)
    back = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert back == tokenizer and back.hash == tokenizer.hash


@rule
@given(text=TEXT)
def test_gpt2_round_trip(gpt2, text):
    check_round_trip(gpt2, text)


@rule
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(256, 300), TEXT)
def test_bpe_trained_on_anything_encodes_anything(corpus, size, text):
    tokenizer = bpe_tokenizer(corpus, size)
    assert 257 <= tokenizer.vocab_size <= size + 1
    check_round_trip(tokenizer, text)
    assert Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer


@rule
@given(TEXT, st.characters(categories=("Cs",)), TEXT)
def test_a_lone_surrogate_is_refused_and_named(before, surrogate, after):
    for tokenizer in (BPE[300], char_tokenizer([before + after + "a"])):
        with pytest.raises(ValueError, match=f"U\\+{ord(surrogate):04X} at position {len(before)},"):
            tokenizer.encode(before + surrogate + after)


@rule
@given(st.lists(st.integers(-3, 310), max_size=20))
def test_ids_give_text_or_one_line(ids):
    for tokenizer in (BPE[300], char_tokenizer(["abc\0é"])):
        text = outcome(lambda tokenizer=tokenizer: tokenizer.decode(ids))
        assert (text is not None) == all(0 <= i < tokenizer.vocab_size for i in ids)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@rule
@given(st.sampled_from(["kind", "pattern", "eot", "ranks", "rank", "x"]), JSON | st.just("\xe9"))
def test_a_changed_tokenizer_file_round_trips_or_is_refused(key, value):
    for tokenizer in (BPE[256], char_tokenizer(["abc"])):
        stored = tokenizer.to_dict()
        if key == "rank":
            stored["ranks"][1] = value
        else:
            stored[key] = value
        back = outcome(lambda stored=stored: Tokenizer.from_dict(stored))
        if back is not None:
            assert back.decode(back.encode("c")) == "c"  # each kind keeps its promise


# --- windows of a token file


@dataclass
class Ids:
    """An open token file of ids 0, 1, 2, ... so that a token tells where it is from."""

    n: int

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, "t.bin")
        about = {"split": "train", "source": "", "tokenizer_hash": "", "corpus_sha256": ""}
        write_tokens(path, iter([np.arange(self.n)]), 70_000, {**about, "n_bytes": 1, "n_documents": 1})
        self.tokens = open_tokens(path)
        return self.tokens

    def __exit__(self, *exception):
        self.tokens.close()
        self.folder.cleanup()


@rule
@given(
    n_tokens=st.integers(2, 10**12), share=st.floats(0, 1), seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40), n=st.integers(0, 50),
)  # fmt: skip
def test_batch_starts_are_in_range_and_fixed(n_tokens, share, seed, step, n):
    """LDR-2"""
    block_size = 1 + int(share * (n_tokens - 2))
    starts = batch_starts(n_tokens, block_size, seed, step, n)
    assert starts.dtype == np.int64 and starts.shape == (n,)
    assert all(s >= 0 and s + block_size + 1 <= n_tokens for s in starts.tolist())
    assert starts[: n // 2].tolist() == batch_starts(n_tokens, block_size, seed, step, n // 2).tolist()


@rule
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 2**63 - 1))
def test_every_start_is_reached(n_starts, block_size, seed):
    n_tokens = n_starts + block_size
    starts = [batch_starts(n_tokens, block_size, seed, step, 16) for step in range(40)]
    assert set(np.concatenate(starts).tolist()) == set(range(n_starts))


@rule
@given(st.integers(2, 300), st.data())
def test_targets_are_the_inputs_one_token_later(n_tokens, data):
    block_size = data.draw(st.integers(1, n_tokens - 1))
    with Ids(n_tokens) as tokens:
        seed, step = data.draw(st.tuples(st.integers(0, 99), st.integers(0, 99)))
        starts = batch_starts(n_tokens, block_size, seed, step, 5)
        x, y = get_batch(tokens, starts, block_size)
        with pytest.raises(IndexError):
            get_batch(tokens, np.array([n_tokens - block_size]), block_size)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (5, block_size)
    assert x.tolist() == [list(range(s, s + block_size)) for s in starts.tolist()]
    assert torch.equal(y, x + 1)


@rule
@given(st.integers(2, 300), st.integers(1, 320), st.none() | st.integers(1, 50), st.integers(1, 7))
def test_evaluation_reads_each_token_once(n_tokens, block_size, n_windows, batch_size):
    with Ids(n_tokens) as tokens:
        batches = list(eval_batches(tokens, block_size, n_windows, batch_size))
        assert [y.tolist() for _, y in batches] == [
            y.tolist() for _, y in eval_batches(tokens, block_size, n_windows, batch_size)
        ]
    targets = [t for _, y in batches for t in y.flatten().tolist()]
    assert all(torch.equal(y, x + 1) and len(x) <= batch_size for x, y in batches)
    assert len(set(targets)) == len(targets)
    if n_windows is None or n_windows > (n_tokens - 1) // block_size:
        assert targets == list(range(1, n_tokens))
    else:
        assert len(targets) == n_windows * block_size
        starts = eval_windows(n_tokens, block_size, n_windows)
        assert len(starts) == n_windows and set(np.diff(starts) >= block_size) <= {True}


@rule
@given(st.sampled_from(["version", "dtype", "n_tokens", "max_id", "vocab_size", "source", "x"]), JSON)
def test_a_changed_token_header_is_refused_or_reads_right(key, value):
    with Ids(50) as tokens, tempfile.TemporaryDirectory() as folder:
        raw, path = tokens.path.read_bytes(), Path(folder, "t.bin")
        path.write_bytes(pack_header({**tokens.header, key: value}) + raw[tokens.offset :])
        again = outcome(lambda: open_tokens(path, 70_000))
        if again is not None:
            with again:
                batch = outcome(lambda: get_batch(again, np.array([0]), 49))
                assert batch is None or batch[1].tolist() == [list(range(1, 50))]


# --- the sampler


LOGITS = st.lists(
    st.lists(
        st.sampled_from([0.0, 1.0, -1.0, 5.0, -1e30, 1e30, -math.inf]) | st.floats(-30, 30, width=32),
        min_size=7, max_size=7,
    ),
    min_size=1, max_size=4,
).map(torch.tensor).filter(lambda t: bool(t.amax(-1).isfinite().all()))  # fmt: skip
UNIFORM = st.floats(0, 1, exclude_max=True)
TEMPERATURE = st.sampled_from([1e-300, 1e-6, 0.1, 0.8, 1.0, 3.0, 1e300]) | st.floats(0.05, 20)
SAMPLINGS = st.builds(
    Sampling,
    temperature=TEMPERATURE,
    top_k=st.none() | st.integers(0, 10),
    top_p=st.just(1.0) | st.floats(0, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
)


def allowed(row: torch.Tensor, s: Sampling, slack: float) -> list[bool]:
    """Which ids may be drawn, by the words of the options; a share within `slack` of its limit may be."""
    z = row.double()
    t = min(max(s.temperature, 1e-30), 1e30)
    keep = z > -math.inf
    if s.top_k:
        keep &= z >= z.sort(descending=True).values[min(s.top_k, len(z)) - 1]
    probs = torch.where(keep, ((z - z.max()) / t).exp(), 0.0)
    probs /= probs.sort(descending=True).values[: s.top_k or len(z)].sum()  # of ties at the edge some count
    larger = torch.tensor([float(probs[probs > p].sum()) for p in probs])  # what comes before it for sure
    if s.top_p < 1:
        keep &= (larger < s.top_p + slack) | (larger == 0)
    if s.min_p > 0:
        keep &= probs >= s.min_p * probs.max() - slack
    return (keep & (probs > 0) | (probs == probs.max())).tolist()


@rule
@given(LOGITS, SAMPLINGS, st.lists(UNIFORM, min_size=4, max_size=4))
def test_no_id_outside_the_allowed_set_is_drawn(logits, sampling, numbers):
    u = torch.tensor(numbers[: len(logits)], dtype=torch.float64)
    ids = choose(logits, u, sampling)
    assert ids.shape == (len(logits),) and ids.dtype == torch.int64
    for row, i in zip(logits, ids.tolist(), strict=True):
        assert allowed(row, sampling, slack=1e-5)[i], (row, sampling, i)
    alone = torch.cat([choose(logits[n : n + 1], u[n : n + 1], sampling) for n in range(len(logits))])
    assert torch.equal(ids, alone)  # a row's draw does not depend on the others


@rule
@given(LOGITS, st.floats(0.01, 0.99), TEMPERATURE)
def test_top_p_keeps_the_smallest_set_that_is_enough(logits, top_p, temperature):
    """All that are kept are needed, and together they are enough: seen by drawing with a fine comb."""
    row = logits[:1]
    comb = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = set(choose(row.expand(4000, -1), comb, Sampling(temperature=temperature, top_p=top_p)).tolist())
    probs = ((row[0].double() - row.max()) / min(max(temperature, 1e-30), 1e30)).softmax(-1)
    total, least = float(probs[list(drawn)].sum()), float(probs[list(drawn)].min())
    assert total >= top_p - 2e-3  # one rarer than the teeth of the comb may have been missed
    assert len(drawn) == 1 or total - least < top_p + 1e-5
    rest = [float(p) for i, p in enumerate(probs) if i not in drawn]
    assert not rest or max(rest) <= least + 1e-6 or max(rest) < 1e-3


@rule
@given(LOGITS, st.lists(UNIFORM, min_size=4, max_size=4), st.none() | st.integers(0, 9), st.floats(0, 1))
def test_greedy_is_the_likeliest(logits, numbers, top_k, top_p):
    u, rows = torch.tensor(numbers[: len(logits)], dtype=torch.float64), range(len(logits))
    best = logits.amax(-1).tolist()
    for s in (
        Sampling(temperature=0.0, top_k=top_k, top_p=top_p), Sampling(top_k=1), Sampling(top_p=0.0),
        Sampling(min_p=1.0), Sampling(temperature=1e-300, top_p=top_p),
    ):  # fmt: skip
        ids = choose(logits, u, s).tolist()
        # within what float32 can tell apart once it is a probability
        near = 0.0 if s.temperature == 0 or s.top_k == 1 else 1e-6
        assert all(logits[n, ids[n]] >= best[n] - near for n in rows), (logits, ids, s)


@rule
@given(LOGITS, UNIFORM, st.floats(0.1, 10), st.sets(st.integers(0, 6)))
def test_the_repetition_penalty_is_what_it_says(logits, number, penalty, ids):
    seen = torch.zeros(len(logits), 7, dtype=torch.bool)
    seen[:, list(ids)] = True
    by_hand = logits.clone()
    for i in ids:
        column = by_hand[:, i]
        by_hand[:, i] = torch.where(column > 0, column / penalty, column * penalty)
    u = torch.full((len(logits),), number, dtype=torch.float64)
    got = outcome(lambda: choose(logits, u, Sampling(repetition_penalty=penalty), seen))
    expected = outcome(lambda: choose(by_hand, u, Sampling()))
    assert (got is None) == (expected is None) and (got is None or torch.equal(got, expected))


@rule
@given(LOGITS, st.sampled_from([math.nan, math.inf]), st.integers(0, 6), SAMPLINGS)
def test_scores_that_are_no_numbers_are_refused(logits, bad, at, sampling):
    logits = logits.clone()
    logits[-1, at] = bad
    assert outcome(lambda: choose(logits, torch.zeros(len(logits), dtype=torch.float64), sampling)) is None


NUMBERS = st.floats() | st.sampled_from([-1.0, 0.0, 1.0, 1e-320])


@rule
@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.none() | st.integers(-2, 2**63))
def test_sampling_options_are_right_or_refused(temperature, penalty, top_p, min_p, top_k):
    good = temperature >= 0 and 0 < penalty < math.inf and 0 <= top_p <= 1 and 0 <= min_p <= 1
    made = outcome(lambda: Sampling(penalty, temperature, top_k, top_p, min_p))
    assert (made is not None) == (good and (top_k is None or top_k >= 0))
    if made is not None:
        ids = choose(torch.tensor([[0.5, 2.0, -1.0]]), torch.tensor([0.7], dtype=torch.float64), made)
        assert 0 <= int(ids) < 3


# --- checkpoints and data files


LENGTHS = st.integers(0, 2**60) | st.integers(0, 60)
TENSOR = {
    "dtype": st.sampled_from(["F32", "F16", "I64", "F4", "x"]),
    "shape": st.lists(LENGTHS, max_size=3),
    "data_offsets": st.lists(LENGTHS, min_size=2, max_size=2),
}
NAMES = st.sampled_from(["transformer.wte.weight", "a\nb", "lm_head.weight"])
TENSORS = st.dictionaries(NAMES, st.fixed_dictionaries(TENSOR), min_size=1)
SHAPE = ["n_layer", "n_head", "n_embd", "vocab_size", "block_size", "n_kv_head", "norm", "bias", "x"]

@rule
@given(st.integers(0, 2**64 - 1) | st.integers(0, 4000), JSON | TENSORS, st.binary(max_size=50))
def test_any_header_of_a_weights_file_is_refused_in_one_line(length, header, tail):
    """CKP-9: with a manifest that agrees, and whatever size the header claims."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        fuzz.save_tiny(BPE[256])
        text = json.dumps(header).encode("utf-8")
        for size in (len(text), length):
            (fuzz.PLACE / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + tail)
            fuzz.sign_checkpoint()
            assert outcome(lambda: load_checkpoint(Path("run"))) is None


@rule
@given(st.sampled_from(SHAPE), JSON)
def test_any_value_in_a_stored_shape_is_refused_or_right(key, value):
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        fuzz.save_tiny(BPE[256])
        path = fuzz.PLACE / "config.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["model"][key] = value
        path.write_text(json.dumps(stored), encoding="utf-8")
        fuzz.sign_checkpoint()
        loaded = outcome(lambda: load_checkpoint(Path("run")))
    if loaded is not None:
        found = getattr(loaded.model.config, key)
        assert (found == value and type(found) is type(value)) or (key == "n_kv_head" and value is None)


CELL = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)


@rule
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6), st.sampled_from([".csv", ".jsonl", ".json"]))
def test_texts_in_tables_come_back(rows, ending):
    """DAT-1: what other programs write is read as it is."""
    import csv

    texts = [text for _, text in rows]
    assume(any(texts) and not all(text.strip("-0123456789.") == "" for text in texts))
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        with open("t" + ending, "w", encoding="utf-8", newline="") as file:
            if ending == ".csv":
                csv.writer(file).writerows([("x", "text"), *rows])
            else:
                records = [{"x": x, "text": text} for x, text in rows]
                joined = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
                file.write(json.dumps(records) if ending == ".json" else joined)
        assert list(load_corpus("t" + ending).documents) == texts


# --- many at once


def run() -> dict[str, Any]:
    """Try each rule EXAMPLES times: {"cases": .., "seconds": .., "rules": {name: cases}, "failures": [..]}.

    Fewer where a rule has fewer cases. Without GPT-2's vocabulary its rule is left out.
    """
    begin, counts, failures = time.perf_counter(), dict[str, int](), []
    for name, test in list(globals().items()):
        if not hasattr(test, "hypothesis"):
            continue
        given: dict[str, Any] = {}
        if name == "test_gpt2_round_trip":
            if not SHARED_TIKTOKEN.is_dir():
                continue
            os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED_TIKTOKEN))
            given = {"gpt2": gpt2_tokenizer()}
        inner, counts[name] = test.hypothesis.inner_test, 0

        def counted(*args: Any, name: str = name, inner: Callable[..., None] = inner, **drawn: Any) -> None:
            counts[name] += 1
            inner(*args, **drawn)

        test.hypothesis.inner_test = counted
        try:
            test(**given)
        except Exception as error:
            failures.append({"rule": name, "why": f"{type(error).__name__}: {error}"[:500]})
        finally:
            test.hypothesis.inner_test = inner
    seconds = time.perf_counter() - begin
    return {"cases": sum(counts.values()), "seconds": seconds, "rules": counts, "failures": failures}
