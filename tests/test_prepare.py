"""data/sources.py and data/prepare.py: what is read, how it is split, what lies on disk afterwards."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import prepare as prepare_module
from data.loader import check_fits, open_tokens
from data.prepare import load_prepared, prepare, split_chunks, split_documents
from data.sources import _stdlib_files, corpus_fingerprint, load_corpus
from data.tokenizer import EOT, bpe_tokenizer, gpt2_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "tinyshakespeare.txt"
SHARED_TIKTOKEN = ROOT.parent / "shared" / "tiktoken"


def quiet(text):
    del text


def folder_of(tmp_path, texts):
    folder = tmp_path / "docs"
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(text.encode("utf-8"))
    return folder


def ids_of(path):
    with open_tokens(path) as tokens:
        return tokens.read(0, tokens.n_tokens).tolist()


def names_in(folder):
    return sorted(p.name for p in folder.iterdir())


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# sources


def test_default_is_the_standard_library():
    corpus = load_corpus("python")
    assert corpus.name == "python"
    assert len(corpus.documents) > 300
    documents = set(corpus.documents)
    assert Path(json.__file__).read_bytes().decode("utf-8") in documents  # json/__init__.py, whole
    assert Path(os.__file__).read_bytes().decode("utf-8") in documents
    root = Path(os.__file__).parent
    paths = [path.relative_to(root) for path in _stdlib_files(root)]
    assert [p.as_posix() for p in paths] == sorted(p.as_posix() for p in paths)
    assert not {part for p in paths for part in p.parts} & {"test", "tests", "idle_test", "site-packages"}
    assert {p.suffix for p in paths} == {".py"}
    assert corpus_fingerprint("python") == (corpus.name, corpus.source, corpus.fingerprint)


def test_python_without_source_files(monkeypatch, tmp_path):
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"no standard library source .* --dataset="):
        load_corpus("python")


def test_text_file_keeps_each_character(tmp_path):
    """DAT-1: line ends, accents and emoji as they stand; only a byte order mark goes."""
    path = tmp_path / "a.txt"
    text = "é—💡\r\nb\rc\n\u2028d"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    assert list(load_corpus(str(path)).documents) == [text]


def test_folder_is_sorted_and_says_what_it_skips(tmp_path):
    for name, raw in {
        "b/2.md": b"two",
        "a.txt": b"one",
        "c.png": b"\x89PNG\0",
        "l.txt": b"caf\xe9",
        ".hid": b"x",
        ".git/config": b"x",
        "empty.txt": b"",
        "b/__pycache__/x.txt": b"x",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    corpus = load_corpus(str(tmp_path))
    assert [d for d in corpus.documents if d] == ["one", "two"]
    assert corpus.notes == ("skipped 2 file(s) that are not UTF-8 text: c.png, l.txt",)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "nothing to learn"),
        (b"\xef\xbb\xbf", "nothing to learn"),
        (b"ab\0c", r"is binary, not text \(a zero byte at offset 2\)"),
        (b"caf\xe9 x", r"not UTF-8 \(byte 0xE9 at offset 3\).*iconv -f LATIN1 -t UTF-8"),
        ("hi".encode("utf-16"), "is UTF-16.*iconv -f UTF-16 -t UTF-8"),
    ],
)
def test_files_that_are_not_text(tmp_path, raw, expected):
    path = tmp_path / "bad.txt"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=expected) as error:
        load_corpus(str(path))
    assert "bad.txt" in one_line(error)


def test_folder_without_text(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match=r"no text in it \(skipped 1 file"):
        load_corpus(str(tmp_path))


def test_unknown_data_set_lists_the_known_and_the_nearest(tmp_path, monkeypatch):
    """CFG-9"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_notes.txt").write_text("x", encoding="utf-8")
    for typo, near in (("pyhton", "python"), ("my_note.txt", "my_notes.txt")):
        with pytest.raises(ValueError, match=f"--dataset={typo}: .*did you mean {near}") as error:
            load_corpus(typo)
        assert "hub:owner/name" in one_line(error)
    with pytest.raises(ValueError, match="nothing is downloaded by address"):
        load_corpus("https://example.org/a.txt")  # DAT-13, DAT-14: local files only
    with pytest.raises(ValueError, match="expected hub:owner/name"):
        load_corpus("hub:name")


def test_known_name_wins_over_a_local_file(tmp_path, monkeypatch):
    """PRE-6's sibling: what the name means is written down, and the file has a name too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "python").write_text("mine", encoding="utf-8")
    assert list(load_corpus("./python").documents) == ["mine"]
    assert corpus_fingerprint("python")[1].startswith("standard library of Python 3.")


ROWS = ['a\r\nb, "q"', "é💡", "NA", "12"]


@pytest.fixture
def tables(tmp_path):
    import csv

    import pyarrow
    import pyarrow.parquet

    records = [{"text": text, "n": i} for i, text in enumerate(ROWS)]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "t.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "t.json").write_text(json.dumps(records), encoding="utf-8")
    with open(tmp_path / "t.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["text", "n"], *([r["text"], r["n"]] for r in records)])
    pyarrow.parquet.write_table(pyarrow.table({"text": [*ROWS, None], "n": range(5)}), tmp_path / "t.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.csv", "t.parquet"])
def test_tables_give_a_document_per_row_without_network(tables, name, monkeypatch):
    """PLT-6, DAT-1"""

    def refuse(*args):
        raise AssertionError("network touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert list(load_corpus(str(tables / name)).documents) == ROWS
    with pytest.raises(ValueError, match="no column 'body'; it has: text, n: pass --text_column") as error:
        load_corpus(str(tables / name), text_column="body")
    one_line(error)
    with pytest.raises(ValueError, match="column 'n' holds int64, not text"):
        load_corpus(str(tables / name), text_column="n")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet", "x.json", "x.csv"])
@pytest.mark.parametrize("raw", [b"", b"{not a table", b"\0\xff\xfe" * 50])
def test_broken_tables_are_one_line(tmp_path, name, raw):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as error:
        load_corpus(str(tmp_path / name))
    one_line(error)


def test_hub_out_of_reach_is_one_line(monkeypatch):
    """DAT-13, DAT-14"""
    import huggingface_hub

    def no_network(*args, **kwargs):
        raise OSError("Name or service not known\nmore lines")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_network)
    with pytest.raises(ValueError, match=r"--dataset=hub:a/b:c: cannot be loaded .*Name or service") as error:
        load_corpus("hub:a/b:c")
    one_line(error)


def test_hub_gives_the_train_split_and_its_revision(monkeypatch):
    """DAT-17: the revision that was read is in the records."""
    from types import SimpleNamespace

    import datasets
    import huggingface_hub

    asked = []

    def fake_load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": ["one", None, "two"]})

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *a, **k: SimpleNamespace(sha="abc123"))
    monkeypatch.setattr(datasets, "load_dataset", fake_load)
    corpus = load_corpus("hub:a/b:c")
    assert list(corpus.documents) == ["one", "two"]
    assert (corpus.name, corpus.source) == ("b", "hub:a/b:c at abc123")
    assert asked == [(("a/b", "c"), {"split": "train", "revision": "abc123"})]


# splitting


def test_split_by_document_holds_both_sides():
    """DAT-2: 20 documents of which one is for validation; and its siblings."""
    train, val = split_documents([10] * 20, 0.05)
    assert len(val) == 1
    assert sorted(train + val) == list(range(20))
    assert split_documents([10] * 20, 0.05) == (train, val)
    assert split_documents([900, 5, 0, 95], 0.1)[1] in ([3, 1], [1, 3], [3], [1])
    assert split_documents([5, 7], 0.1) == ([1], [0])  # none fits: the shortest
    assert split_documents([5, 7], 0.99)[0]  # never all


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_split_properties(lengths, fraction):
    if sum(map(bool, lengths)) < 2:
        return
    train, val = split_documents(lengths, fraction)
    assert train
    assert val
    assert sorted(train + val) == [i for i, n in enumerate(lengths) if n]
    assert len(val) == 1 or sum(lengths[i] for i in val) <= fraction * sum(lengths) + 1e-6


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("ab1_é\u0301 \t\r\n.,='\x0b\u3000x"), max_size=120), st.integers(1, 20))
def test_chunks_have_the_tokens_of_the_whole(text, size):
    tokenizer = bpe_tokenizer(["a b.\n  c = 'x'\r\n\tab1\n\n" * 9, "..\n\n  ", "  \n", "\x0b\n "], 290)
    chunks = split_chunks(text, size)
    assert "".join(chunks) == text
    assert [i for ids in tokenizer.encode_batch(chunks) for i in ids] == tokenizer.encode(text)


def test_chunks_of_gpt2_have_the_tokens_of_the_whole(monkeypatch):
    if not (SHARED_TIKTOKEN.is_dir() and SHAKESPEARE.is_file()):
        pytest.skip("no tiktoken cache or Shakespeare in ../shared")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_TIKTOKEN))
    tokenizer = gpt2_tokenizer()
    text = SHAKESPEARE.read_text(encoding="utf-8")[:100_000] + "a  \n\n \t b's  \r\n" * 50
    chunks = split_chunks(text, 50)
    assert len(chunks) > 1000
    assert [i for ids in tokenizer.encode_batch(chunks) for i in ids] == tokenizer.encode(text)


# preparing


def test_end_of_text_once_after_each_document_and_counts(tmp_path):
    """DAT-16, DAT-2: ids on disk, one separator per document, token count = sum of the documents'."""
    texts = [f"document {i:02} " + "word " * 8 for i in range(20)]
    done = prepare(
        str(folder_of(tmp_path, texts)), "char", val_fraction=0.05, data_dir=tmp_path / "p", log=quiet
    )
    train, val = ids_of(done.train), ids_of(done.val)
    eot = done.tokenizer.eot_id
    for ids, split in ((train, "train"), (val, "val")):
        assert ids[-1] == eot
        header = done.meta[split]
        assert ids.count(eot) == header["n_documents"]
        assert len(ids) == header["n_tokens"] == header["n_bytes"] + header["n_documents"]
    back = (done.tokenizer.decode(train) + done.tokenizer.decode(val)).split(EOT)[:-1]
    assert sorted(back) == sorted(texts)
    assert back != texts  # shuffled
    assert done.meta["val"]["n_documents"] == 1
    assert len(train) + len(val) == sum(map(len, texts)) + 20


def test_one_document_is_cut_at_nine_tenths(tmp_path):
    """DAT-16: no separator in the middle of the text."""
    path = tmp_path / "one.txt"
    path.write_text("abcdefghij" * 7 + "xyz", encoding="utf-8")
    done = prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    assert done.tokenizer.decode(ids_of(done.train)) == ("abcdefghij" * 7)[:65]
    assert done.tokenizer.decode(ids_of(done.val)) == "fghijxyz" + EOT
    assert done.tokenizer.eot_id not in ids_of(done.train)


def test_literal_marker_in_the_corpus_is_plain_text(tmp_path):
    """DAT-6"""
    path = tmp_path / "m.txt"
    path.write_text(f"one {EOT} two " * 30, encoding="utf-8")
    for kind in ("char", "bpe"):
        done = prepare(str(path), kind, 300, data_dir=tmp_path / "p", log=quiet)
        assert done.tokenizer.eot_id not in ids_of(done.train)
        assert ids_of(done.val).count(done.tokenizer.eot_id) == 1


def test_char_shakespeare_counts(tmp_path):
    if not SHAKESPEARE.is_file():
        pytest.skip("no Shakespeare in ../shared/data")
    done = prepare(str(SHAKESPEARE), "char", data_dir=tmp_path, log=quiet)
    assert done.tokenizer.vocab_size == 65 + 1
    assert done.meta["train"]["n_tokens"] == 1_003_854
    assert done.meta["val"]["n_tokens"] == 111_540 + 1  # and the end-of-text id
    assert done.meta["characters"] == 1_115_394
    text = SHAKESPEARE.read_text(encoding="utf-8")
    assert done.tokenizer.decode(ids_of(done.train)) == text[:1_003_854]


def test_val_characters_are_known_to_the_char_tokenizer(tmp_path):
    done = prepare(str(folder_of(tmp_path, ["aaaa" * 20, "z"])), "char", data_dir=tmp_path / "p", log=quiet)
    assert ids_of(done.val) == [1, 2]


def test_two_runs_give_the_same_bytes(tmp_path):
    """DAT-17: and the records tell source, counts and hash."""
    folder = folder_of(tmp_path, [f"text number {i}\n" * (i + 1) for i in range(12)])
    for tokenizer in ("char", "bpe"):
        first = prepare(str(folder), tokenizer, 300, data_dir=tmp_path / "p1", log=quiet)
        second = prepare(str(folder), tokenizer, 300, data_dir=tmp_path / "p2", log=quiet)
        names = names_in(first.folder)
        assert names == ["meta.json", "tokenizer.json", "train.bin", "val.bin"]
        assert first.folder.name == second.folder.name
        for name in names:
            assert (first.folder / name).read_bytes() == (second.folder / name).read_bytes()
    assert first.meta["source"] == folder.resolve().as_posix()
    assert len(first.meta["train"]["corpus_sha256"]) == 64
    assert first.folder.name.startswith("docs-bpe300-")


def test_reuse_and_what_ends_it(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some words " * 40, encoding="utf-8")
    said: list[str] = []
    first = prepare(str(path), "char", data_dir=tmp_path / "p", log=said.append)
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "load_corpus", None)  # a second run must not read the text
        second = prepare(str(path), "char", data_dir=tmp_path / "p", log=said.append)
    assert second == first
    assert "prepared before" in said[-1]
    other = prepare(str(path), "bpe", 260, data_dir=tmp_path / "p", log=quiet)
    assert other.folder != first.folder
    path.write_text("other words " * 40, encoding="utf-8")
    assert prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet).folder != first.folder


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "train.bin", "val.bin"])
def test_damaged_files_are_prepared_again(tmp_path, name):
    path = tmp_path / "a.txt"
    path.write_text("some words " * 40, encoding="utf-8")
    done = prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    good = (done.folder / name).read_bytes()
    for bad in (good[:-3], b"", None):
        if bad is None:
            (done.folder / name).unlink()
        else:
            (done.folder / name).write_bytes(bad)
        assert load_prepared(done.folder) is None
        prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
        assert (done.folder / name).read_bytes() == good
    assert names_in(tmp_path / "p") == [done.folder.name]


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a POSIX matter")
def test_full_disk_leaves_nothing(tmp_path):
    import resource

    path = tmp_path / "a.txt"
    path.write_text("some words " * 10_000, encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ValueError, match=r"cannot be written \(.*\): free some space") as error:
            prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    one_line(error)
    assert names_in(tmp_path / "p") == []


def test_interrupt_leaves_nothing_and_old_litter_goes(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("some words " * 40, encoding="utf-8")

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_tokens", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    assert names_in(tmp_path / "p") == []
    done = prepare(str(path), "char", data_dir=tmp_path / "q", log=quiet)
    litter = [tmp_path / "p" / f".{done.folder.name}.{name}.tmp" for name in ("old", "new")]
    for folder in litter:
        folder.mkdir()
    os.utime(litter[0], (0, 0))
    prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    assert names_in(tmp_path / "p") == sorted([litter[1].name, done.folder.name])


def test_tiny_corpus_is_refused_with_counts(tmp_path):
    """DAT-18: 1,000 characters, block 256."""
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 100, encoding="utf-8")
    done = prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    expected = r"val split has 101 tokens.*largest block_size that fits is 100"
    with (
        open_tokens(done.val, done.tokenizer.vocab_size) as tokens,
        pytest.raises(ValueError, match=expected),
    ):
        check_fits(tokens, 256, "val")
    path.write_text("a", encoding="utf-8")
    with pytest.raises(ValueError, match="1 character: too few"):
        prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    path.write_text("ab", encoding="utf-8")
    done = prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    assert (ids_of(done.train), ids_of(done.val)) == ([0], [1, 2])


def test_bad_settings_are_refused_before_any_work(tmp_path):
    for bad, expected in (
        ({"tokenizer": "word"}, "--tokenizer=word"),
        ({"val_fraction": 0.0}, "--val_fraction=0.0"),
        ({"val_fraction": float("nan")}, "--val_fraction=nan"),
        ({"vocab_size": 9}, "--vocab_size=9"),
    ):
        with pytest.raises(ValueError, match=expected):
            prepare("python", **bad, data_dir=tmp_path / "p", log=quiet)
    assert not (tmp_path / "p").exists() or names_in(tmp_path / "p") == []


def _prepare_in_child(args):
    dataset, data_dir = args
    return prepare(dataset, "bpe", 300, data_dir=data_dir, log=quiet).folder.name


def test_spawned_workers_can_prepare_at_the_same_time(tmp_path):
    """DAT-4: no child processes of its own, and the loser of the race uses the winner's files."""
    folder = folder_of(tmp_path, ["some words and more\n" * 50] * 10)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        names = pool.map(_prepare_in_child, [(str(folder), tmp_path / "p")] * 2, chunksize=1)
    assert names[0] == names[1]
    assert names_in(tmp_path / "p") == [names[0]]
    assert load_prepared(tmp_path / "p" / names[0])


def test_importing_is_cheap_and_silent():
    """DAT-4, CFG-6: no heavy library, nothing printed, nothing written."""
    code = (
        "import sys, data.prepare, data.loader, data.sources, data.tokenizer;"
        "print(sorted({'tiktoken', 'rustbpe', 'datasets', 'torch', 'tqdm', 'requests'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_file_from_another_tokenizer_is_not_reused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words " * 40, encoding="utf-8")
    done = prepare(str(path), "char", data_dir=tmp_path / "p", log=quiet)
    (done.folder / "tokenizer.json").write_text(
        json.dumps(bpe_tokenizer([], 256).to_dict()), encoding="utf-8"
    )
    assert load_prepared(done.folder) is None


def test_ids_are_read_back_as_written(tmp_path):
    texts = ["é💡\r\n" * 30, "plain words\n" * 30, "x" * 100]
    done = prepare(str(folder_of(tmp_path, texts)), "bpe", 280, data_dir=tmp_path / "p", log=quiet)
    ids = np.array(ids_of(done.train) + ids_of(done.val))
    assert done.tokenizer.token_bytes()[ids].sum() == sum(len(t.encode("utf-8")) for t in texts)
    assert sorted(done.tokenizer.decode(ids).split(EOT)[:-1]) == sorted(texts)
