"""Damaged and hostile files: some hundreds of each format, and one test for each fault that was found so."""

import json
from pathlib import Path

import fuzz
import pytest
import torch

import checkpoint
from config import parse
from data.loader import open_tokens
from data.prepare import load_prepared, prepare
from data.sources import load_corpus
from data.tokenizer import PATTERNS, Tokenizer, bpe_tokenizer, char_tokenizer
from evaluation import evaluate_run
from generation import Sampling

FORMATS = fuzz.formats()
CASES = {"text": 200, "json": 200, "jsonl": 200, "csv": 200, "preset": 300}
CASES |= dict.fromkeys(("prepared", "signed prepared", "signed eval_only", "parquet"), 40)  # slow to read


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_in_one_line_or_read_right(name):
    """CKP-9, DAT-12: no traceback, no wrong data, nothing run, no absurd memory or time."""
    found = fuzz.run_format(name, FORMATS[name][1], CASES.get(name, 80), seed=1)
    assert found["failures"] == []
    whole = ("folder", "prepared", "signed prepared")  # these leave out a file, or make it anew
    assert found["refused"] > 10 or name in whole
    assert found["read"] > 0 or name in ("resume", "parquet")


def test_a_case_can_be_done_again():
    first, again = (fuzz.replay("signed tokenizer bpe", 1, 5) for _ in range(2))
    assert first == again
    outcomes = {fuzz.replay("signed checkpoint rope", 1, case)[1] for case in range(12)}
    assert outcomes == {"refused", "read"}


def judge(read, expected=None, right=lambda got, expected: got == expected):
    """What the engine says of a way to read."""
    return fuzz.judge(fuzz.Format(lambda: None, (), read, (), right=right), expected)


def fail(error):
    raise error


def test_the_engine_sees_what_it_looks_for(tmp_path, monkeypatch):
    """Each kind of failure, made on purpose: else a test that passes would say nothing."""
    monkeypatch.chdir(tmp_path)
    assert judge(lambda: 1, 1) == ("read", "")
    assert judge(lambda: fail(ValueError("one line")))[0] == "refused"
    assert judge(lambda: fail(FileNotFoundError(2, "no such file")))[0] == "refused"
    assert "wrong" in judge(lambda: 1, 2)[1]
    long = ValueError("x" * 3000)
    for error in (KeyError("x"), ValueError("two\nlines"), ValueError(), long, AssertionError()):
        assert judge(lambda error=error: fail(error))[0] == "failed"
    for leaked in (lambda: json.loads("{"), lambda: b"\xff".decode("utf-8"), lambda: fail(BaseException())):
        assert "leaked" in judge(leaked)[1]
    assert "memory" in judge(lambda: fail(MemoryError()))[1]
    if Path("/proc/self/clear_refs").exists():
        assert "MiB" in judge(lambda: len(b"x" * (fuzz.MEMORY + 2**24)), fuzz.MEMORY + 2**24)[1]
        monkeypatch.setattr(fuzz, "SECONDS", 0.05)
        assert "took" in judge(lambda: [None for _ in iter(int, 1)])[1]
    (tmp_path / fuzz.TRAP).touch()
    assert judge(lambda: 1, 1) == ("failed", "it ran code")


def test_damage_is_no_program_until_unpickled(tmp_path, monkeypatch):
    """The files that would run do so: a reader that falls for them is caught."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(fuzz.FOREIGN[2])
    torch.load("x", weights_only=False)
    assert (tmp_path / fuzz.TRAP).exists()


def one_line(call, *words):
    """The one line with which a call is refused."""
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert len(message.splitlines()) == 1 and len(message) < 1000, message
    assert all(word in message for word in words), message
    return message


# --- data/tokenizer.py


BPE = bpe_tokenizer(["ab" * 9], 257)


@pytest.mark.parametrize("pattern", ["x", "(a*)*\\1", "(?:(?=a)a*)*c", "\ud800", "(" * 4000, None, ["x"]])
@pytest.mark.parametrize("tokenizer", [BPE, char_tokenizer(["ab"])], ids=["bpe", "char"])
def test_a_file_cannot_bring_a_pattern_of_its_own(tokenizer, pattern):
    """`x` lost all text but x without a word; the second made tiktoken panic, which is no Exception."""
    stored = {**tokenizer.to_dict(), "pattern": pattern}
    one_line(lambda: Tokenizer.from_dict(stored), "tokenizer: the pattern")


def test_both_of_gpt2s_patterns_cut_alike():
    text = "it's 'll  12 3\t\n\n  é—💡 \u3000x a\u0301\r\n . .. \x0b end   "
    ranks = BPE.ranks + (b"the", b" a", b"  ")
    now, before = (Tokenizer("gpt2", pattern, ranks) for pattern in PATTERNS["gpt2"])
    for at in range(len(text)):
        assert now.encode(text[at:]) == before.encode(text[at:])
    assert now.decode(now.encode(text)) == text
    assert Tokenizer.from_dict(before.to_dict()).pattern == before.pattern


def test_a_kind_that_is_nested_too_deep_to_print():
    kind: list = []
    for _ in range(5000):
        kind = [kind]
    one_line(lambda: Tokenizer.from_dict({**BPE.to_dict(), "kind": kind}), "kind is list")


# --- data/prepare.py


@pytest.fixture
def prepared(tmp_path):
    """A prepared text, and a way to ask for it again."""
    (tmp_path / "a.txt").write_text("some words, and more of them\n" * 20, encoding="utf-8")

    def ask():
        return prepare(str(tmp_path / "a.txt"), "char", data_dir=tmp_path / "p", log=fuzz.quiet)

    return ask


def test_a_wrong_token_in_a_prepared_file_is_noticed(prepared):
    """A flipped bit that still gives an id of the vocabulary was learned from without a word."""
    done = prepared()
    for path in (done.train, done.val):
        whole = path.read_bytes()
        with open_tokens(path) as tokens:
            first = tokens.read(0, 2).tolist()
        damaged = bytearray(whole)
        damaged[tokens.offset : tokens.offset + 4] = damaged[tokens.offset + 2 : tokens.offset + 4] * 2
        path.write_bytes(damaged)
        open_tokens(path).close()  # nothing is wrong with its header
        assert load_prepared(done.folder) is None and first[0] != first[1]
        assert prepared().train == done.train and path.read_bytes() == whole


def test_the_folder_of_other_settings_is_not_used(prepared, tmp_path):
    """A prepared folder that was copied or renamed is whole in itself, but it is other data."""
    done = prepared()
    (tmp_path / "b.txt").write_text("quite another text, and longer\n" * 20, encoding="utf-8")
    other = prepare(str(tmp_path / "b.txt"), "char", data_dir=tmp_path / "p", log=fuzz.quiet)
    ids = done.train.read_bytes()
    for name in ("train.bin", "val.bin", "tokenizer.json", "meta.json"):
        (done.folder / name).write_bytes((other.folder / name).read_bytes())
    assert load_prepared(done.folder)
    again = prepared()
    assert again.tokenizer == done.tokenizer and again.train.read_bytes() == ids


@pytest.mark.parametrize("change", [{"source": None}, {"sha256": {}}, {"sha256": []}, {"sha256": None}])
def test_meta_without_what_is_needed_is_made_anew(prepared, change):
    done = prepared()
    path = done.folder / "meta.json"
    path.write_text(json.dumps({**done.meta, **change}), encoding="utf-8")
    assert load_prepared(done.folder) is None and prepared() == done
    path.write_text(json.dumps([done.meta]), encoding="utf-8")
    assert load_prepared(done.folder) is None and prepared() == done


# --- data/sources.py


def documents(path, text, **options):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return list(load_corpus(str(path), **options).documents)


def test_csv_keeps_texts_that_look_like_numbers(tmp_path):
    """10,000 rows of nothing but digits, after rows of words: 007 became 7."""
    rows = ["word"] * 10_000 + ["007"] * 10_000 + ["1.50"] * 10_000
    assert documents(tmp_path / "t.csv", "text\n" + "\n".join(rows)) == rows


def test_csv_rows_that_do_not_fit_the_header(tmp_path):
    """With one cell too many in all rows, another column was read as the text."""
    for rows in ("a,b,1\nc,d,2\n", "a,1\nc,d,2\n", "a,1\nc\n"):
        one_line(lambda rows=rows: documents(tmp_path / "t.csv", "text,n\n" + rows), "t.csv:", "cells")
    cut = 'text,n\na,1\n"cut short'
    one_line(lambda: documents(tmp_path / "t.csv", cut), "t.csv: cannot be read as csv", "after line 2")
    one_line(lambda: documents(tmp_path / "t.csv", b"text,n\na,1\n\xff,2\n"), "t.csv: not UTF-8 (byte 0xFF)")
    one_line(lambda: documents(tmp_path / "t.csv", 'a,"b\nc"\nx,y\n'), "no column 'text'; it has: a, b c:")
    long = "x" * 300_000  # more than the reader's own limit
    assert documents(tmp_path / "t.csv", f"\ufefftext\n{long}\n\n'x'\n") == [long, "'x'"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_json_nested_too_deep_is_one_line(name, tmp_path):
    """It ended the whole process: pyarrow's reader calls itself until there is no stack left."""
    n = 100_000
    for deep in ("[" * n, '{"a":' * n, '{"text": "x", "y": ' + "[" * n + "]" * n + "}"):
        one_line(lambda deep=deep: documents(tmp_path / name, deep), name, "nested too deep")


def test_json_texts_stay_as_they_are(tmp_path):
    rows = ["2024-01-01", "2024-01-02", "", "a\r\nb\u2028c\x85d", "007"]
    lines = "\ufeff" + "\r\n".join(json.dumps({"n": [1], "text": row}, ensure_ascii=False) for row in rows)
    assert documents(tmp_path / "t.jsonl", lines + '\n\n{"text": null}\n{"n": 1}') == rows
    assert documents(tmp_path / "t.json", lines) == rows  # lines in a .json file
    assert documents(tmp_path / "t.json", json.dumps({"text": "one"}, indent=1)) == ["one"]
    for text, words in {
        '{"text": "a"}\n{"text": "b"': ("t.jsonl:2: not JSON",),
        '{"text": "a"}\n["b"]': ("t.jsonl:2: not an object",),
        '{"text": "\\ud800"}': ("lone surrogate U+D800",),
        '{"text": "a"}\n{"text": 3}': ("column 'text' holds int64, not text",),
        '{"a\\nb": 1, "c": 2}': ("no column 'text'; it has: a b, c:",),
        " \n": ("no text in it",),
    }.items():
        one_line(lambda text=text: documents(tmp_path / "t.jsonl", text), *words)
    latin = b'{"text": "a"}\n{"text": "\xff"}'
    one_line(lambda: documents(tmp_path / "t.jsonl", latin), "t.jsonl:2: not UTF-8")
    one_line(lambda: documents(tmp_path / "t.json", '[\n{"text": "a"},\n{"text" "b"}]'), "t.json:3: not JSON")


def test_bytes_that_are_no_text_in_a_parquet_file(tmp_path):
    """They came out as a bare UnicodeDecodeError in the middle of preparing."""
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    texts = pyarrow.array([b"fine", b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    one_line(lambda: load_corpus(str(path)), "t.parquet", "column 'text' is damaged")


def test_a_link_to_a_table_is_read_as_the_table(tmp_path):
    """As the caches of the hub have it: the link says .csv, and what it points to has no ending."""
    (tmp_path / "blob").write_text("text,n\none,1\ntwo,2\n", encoding="utf-8")
    (tmp_path / "t.csv").symlink_to(tmp_path / "blob")
    assert list(load_corpus(str(tmp_path / "t.csv")).documents) == ["one", "two"]
    assert list(load_corpus(str(tmp_path / "blob")).documents) == ["text,n\none,1\ntwo,2\n"]
    assert load_corpus(str(tmp_path / "t.csv")).fingerprint != load_corpus(str(tmp_path / "blob")).fingerprint


def test_names_that_are_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("~nosuchuser/x", "a\nb", "a\u2028b", "\0", "\ud800"):
        one_line(lambda name=name: load_corpus(name), "no such file")
    one_line(lambda: prepare("x", "a\nb"), "--tokenizer=a b:")


# --- config/__init__.py


def test_presets_in_too_long_a_row(tmp_path):
    """Hundreds of presets that start from one another ended in a RecursionError."""
    for n in range(400):
        (tmp_path / f"{n}.py").write_text(f"base = '{n + 1}.py'\n", encoding="utf-8")
    (tmp_path / "400.py").write_text("temperature = 0.5\n", encoding="utf-8")
    one_line(lambda: read_sampling(tmp_path / "0.py"), "one `base` too many")
    assert read_sampling(tmp_path / "385.py").temperature == 0.5


def read_sampling(path):
    return parse([str(path)], Sampling, prog="x", description="").config


def test_arithmetic_on_huge_numbers_is_refused_at_once(tmp_path):
    """A million hexadecimal digits to the 60th power: minutes, for one line of text."""
    path = tmp_path / "p.py"
    for line in ("_a ** 60", "_a * _a", "_a % 7", "0 * _a", "-_a"):
        path.write_text(f"_a = 0x{'f' * 1_000_000}\ntop_k = {line}\n", encoding="utf-8")
        one_line(lambda: read_sampling(path), "p.py:2", "64-bit")


def test_a_preset_keeps_the_sign_of_zero(tmp_path):
    (tmp_path / "p.py").write_text("min_p = -0.0\ntop_p = +1\n", encoding="utf-8")
    found = read_sampling(tmp_path / "p.py")
    assert str(found.min_p) == "-0.0" and found.top_p == 1.0


# --- generation.py


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": float("nan")},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": float("inf")},
        {"top_p": float("nan")},
        {"min_p": float("nan")},
    ],
    ids=str,
)
def test_sampling_refuses_what_is_no_number(options):
    """A temperature of NaN drew ids from a distribution of NaN without a word."""
    one_line(lambda: Sampling(**options), *options)


# --- checkpoint.py and evaluation.py


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A tiny run in the working directory, and a way to change its config.json and sign it."""
    monkeypatch.chdir(tmp_path)

    def save(changes=None, run=None, **shape):
        fuzz.save_tiny(BPE, **shape)
        path = fuzz.PLACE / "config.json"
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["model"] |= changes or {}
        stored["run"] = {**stored["run"], **(run or {})}
        stored["run"] = {key: value for key, value in stored["run"].items() if value is not ...}
        path.write_text(json.dumps(stored), encoding="utf-8")
        fuzz.sign_checkpoint()

    return save


def rewrite(header, data):
    text = json.dumps(header).encode("utf-8")
    path = fuzz.PLACE / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    fuzz.sign_checkpoint()


def test_layers_that_cost_no_bytes_are_refused_before_they_are_made(tiny, monkeypatch):
    """Half a megabyte, one tensor, 20,000 layers: a minute and a half, and 770 MB, before it was refused."""
    tiny({"n_embd": 1, "n_head": 1, "n_kv_head": 1, "n_inner": 4, "n_layer": 20_000, "block_size": 8})
    stored = json.loads((fuzz.PLACE / "config.json").read_text(encoding="utf-8"))
    config = checkpoint._model_config(fuzz.PLACE, stored["model"])
    n = checkpoint.estimate_n_params(config)["total"]
    rewrite({"a": {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}, bytes(n))
    monkeypatch.setattr(checkpoint, "GPT", None)
    one_line(lambda: checkpoint.load_checkpoint(Path("run")), "layers")


def test_a_table_of_positions_that_no_memory_holds(tiny, monkeypatch):
    tiny({"block_size": 2**20}, position="rope", n_embd=512, n_head=1)
    monkeypatch.setattr(checkpoint, "GPT", None)
    one_line(lambda: checkpoint.load_checkpoint(Path("run")), "block_size")


@pytest.mark.parametrize("kind", ["F4", "I64", "C64", "X\nY", "x" * 5000])
def test_number_formats_that_are_no_weights(kind, tiny):
    """F4 was a traceback, C64 lost half of each number, and the name of an unknown one made several lines."""
    tiny()
    data = (fuzz.PLACE / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, start = json.loads(data[8 : 8 + size]), 0
    bits = {"F4": 4, "I64": 64, "C64": 64}.get(kind, 32)
    for name, entry in header.items():
        if name != "__metadata__":
            n = int(torch.tensor(entry["shape"]).prod()) * bits // 8
            entry.update(dtype=kind, data_offsets=[start, start + n])
            start += n
    rewrite(header, bytes(start))
    one_line(lambda: checkpoint.load_checkpoint(Path("run")), "model.safetensors")


LONG = [{"norm": {"a": [0] * 5000}}, {"norm": "x" * 5000}, {"y" * 5000: 1}]


@pytest.mark.parametrize("changes", LONG, ids=("deep", "long", "key"))
def test_what_is_wrong_in_config_json_is_told_in_short(changes, tiny):
    tiny(changes)
    one_line(lambda: checkpoint.load_checkpoint(Path("run")), "config.json")


@pytest.mark.parametrize(
    "run",
    [
        {"dataset": ...}, {"tokenizer": ...}, {"bpe_size": ...}, {"text_column": ...}, {"val_fraction": ...},
        {"dataset": 3}, {"dataset": None}, {"tokenizer": ["char"]}, {"bpe_size": "256"},
        {"val_fraction": "0.2"}, {"text_column": {}}, {"dataset": "../../etc/passwd"},
        {"dataset": "~nosuchuser/x"},
    ],
    ids=str,
)  # fmt: skip
def test_eval_only_of_a_run_that_does_not_say_its_data(run, tiny):
    """Each was a KeyError or a TypeError."""
    Path("text.txt").write_text(fuzz.TEXT, encoding="utf-8")
    tiny(run=run)
    one_line(lambda: evaluate_run(Path("run"), "cpu", "float32"))


def test_progress_that_is_nested_too_deep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzz.make_resumable()
    path = Path(fuzz.TRAINING)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["progress"] = "[" * 5000
    text = json.dumps(header).encode("utf-8")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    fuzz.sign_checkpoint()
    one_line(fuzz.read_resumable, "training.safetensors")


@pytest.mark.parametrize("dataset", ["A" * 300, "é" * 200, "a/" * 3000, "A\nB" * 100])
def test_a_data_set_longer_than_a_path_is_one_short_line(dataset):
    with pytest.raises(ValueError, match="longer than a path can be") as caught:
        prepare(dataset, "char")
    assert len(str(caught.value)) < 120 and "\n" not in str(caught.value)
