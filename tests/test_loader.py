"""data/loader.py: the file format, windows, and the cost of reading them."""

import json
import pickle
import sys
import threading

import numpy as np
import pytest

from data.loader import (
    ALIGN,
    MAGIC,
    batch_starts,
    check_fits,
    eval_batches,
    eval_windows,
    get_batch,
    open_tokens,
    pack_header,
    write_tokens,
)

ABOUT = {
    "split": "train",
    "source": "a test",
    "tokenizer_hash": "ab" * 32,
    "corpus_sha256": "cd" * 32,
    "n_bytes": 10,
    "n_documents": 1,
}


def make(path, ids, vocab_size=1000):
    write_tokens(path, iter([np.asarray(ids, dtype=np.int64)]), vocab_size, ABOUT)
    return path


def test_file_layout(tmp_path):
    raw = make(tmp_path / "t.bin", [1, 2, 999]).read_bytes()
    length = int.from_bytes(raw[8:12], "little")
    assert raw[:8] == MAGIC == b"HEADCNT\n"
    assert (12 + length) % ALIGN == 0
    assert raw[12 + length :] == b"\x01\x00\x02\x00\xe7\x03"
    header = json.loads(raw[12 : 12 + length])
    assert header == {
        **ABOUT,
        "version": 1,
        "dtype": "uint16",
        "n_tokens": 3,
        "max_id": 999,
        "vocab_size": 1000,
    }


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(100_000, "uint32"), (65_537, "uint32"), (65_536, "uint16")]
)
def test_dtype_follows_the_whole_range_of_ids(tmp_path, vocab_size, dtype):
    """DAT-5: nothing wraps round."""
    ids = [i for i in (0, 65_535, 65_536, 99_999) if i < vocab_size]
    with open_tokens(make(tmp_path / "t.bin", ids, vocab_size)) as tokens:
        assert tokens.header["dtype"] == dtype
        assert tokens.read(0, len(ids)).tolist() == ids
        assert tokens.read(0, 1).dtype.isnative


@pytest.mark.parametrize("bad", [-1, 1000, 70_000])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path, bad):
    """DAT-5: overflow refused."""
    with pytest.raises(ValueError, match=r"token id outside 0 \.\. 999"):
        make(tmp_path / "t.bin", [1, bad])


def test_id_too_large_for_the_model(tmp_path):
    """DAT-12: file, id and vocabulary size are named at start-up."""
    path = make(tmp_path / "t.bin", [1, 70])
    with pytest.raises(
        ValueError, match=r"t\.bin: largest token id 70 does not fit a model with vocab_size=65"
    ):
        open_tokens(path, vocab_size=65)
    open_tokens(path, vocab_size=71).close()


def test_id_above_the_headers_largest_is_found_in_the_batch(tmp_path):
    """DAT-12: damage that the header cannot show."""
    path = make(tmp_path / "t.bin", [1, 2, 3, 4])
    raw = bytearray(path.read_bytes())
    raw[-2:] = b"\xff\xff"
    path.write_bytes(raw)
    with open_tokens(path, 1000) as tokens, pytest.raises(ValueError, match="token id 65535, above"):
        get_batch(tokens, np.array([0]), 3)


def test_raw_file_is_not_ours(tmp_path):
    (tmp_path / "raw.bin").write_bytes(np.arange(100, dtype=np.uint16).tobytes())
    with pytest.raises(ValueError, match=r"raw\.bin: not a token file .* python train\.py --dataset="):
        open_tokens(tmp_path / "raw.bin")
    with pytest.raises(ValueError, match=r"none\.bin: cannot be read"):
        open_tokens(tmp_path / "none.bin")


@pytest.mark.parametrize("cut", [0, 5, 11, 12, 60, -1])
def test_truncated_file_is_refused(tmp_path, cut):
    path = make(tmp_path / "t.bin", range(100))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"t\.bin"):
        open_tokens(path)


def test_huge_header_length_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(MAGIC + b"\xf4\xff\xff\xff" + bytes(500))
    with pytest.raises(ValueError, match=r"header of 4294967284 bytes in a file of 512"):
        open_tokens(path)


def test_deeply_nested_header_is_refused(tmp_path):
    text = b"[" * (ALIGN * 900 - 12)
    (tmp_path / "t.bin").write_bytes(MAGIC + len(text).to_bytes(4, "little") + text)
    with pytest.raises(ValueError, match="is not JSON"):
        open_tokens(tmp_path / "t.bin")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": None},
        {"n_tokens": 5.0},
        {"n_tokens": True},
        {"n_tokens": -1},
        {"n_tokens": 10**30},
        {"dtype": "float32"},
        {"dtype": 3},
        {"max_id": 1000},
        {"max_id": "9"},
        {"source": None},
        {"tokenizer_hash": 1},
        {"max_id": 70_000, "vocab_size": 80_000},
    ],
)
def test_header_fields_are_checked(tmp_path, change):
    path = make(tmp_path / "t.bin", range(5))
    raw = path.read_bytes()
    with open_tokens(path) as tokens:
        header, tail = {**tokens.header, **change}, raw[tokens.offset :]
    path.write_bytes(pack_header(header) + tail)
    with pytest.raises(ValueError, match="unusable header"):
        open_tokens(path)


def test_any_flipped_byte_of_the_header_is_an_error_or_harmless(tmp_path):
    path = make(tmp_path / "t.bin", range(5))
    raw = path.read_bytes()
    with open_tokens(path) as tokens:
        size = tokens.offset
    refused = 0
    for at in range(size):
        for mask in (0x01, 0x80):
            damaged = bytearray(raw)
            damaged[at] ^= mask
            path.write_bytes(damaged)
            try:
                with open_tokens(path, vocab_size=1000) as tokens:
                    x, _ = get_batch(tokens, np.array([0]), 4)
                    assert x.tolist() == [[0, 1, 2, 3]]
            except ValueError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > size  # of 2 * size damages


def test_start_depends_on_seed_and_step_alone():
    first = batch_starts(1000, 64, seed=1, step=7, n=12)
    assert first.tolist() == batch_starts(1000, 64, seed=1, step=7, n=12).tolist()
    assert first[:4].tolist() == batch_starts(1000, 64, seed=1, step=7, n=4).tolist()
    assert first.tolist() != batch_starts(1000, 64, seed=1, step=8, n=12).tolist()
    assert first.tolist() != batch_starts(1000, 64, seed=2, step=7, n=12).tolist()
    assert first.dtype == np.int64


def test_starts_are_the_same_for_ever():
    """A change of these numbers would change every run that is resumed."""
    assert batch_starts(1_000_000, 64, seed=1337, step=0, n=4).tolist() == [296201, 660563, 384046, 864037]


def test_every_legal_start_is_drawn_equally_often():
    """LDR-2"""
    assert set(batch_starts(33, 32, 0, 0, 100).tolist()) == {0}  # N = block + 1: one window
    starts = np.concatenate([batch_starts(37, 32, 0, step, 10) for step in range(1000)])
    counts = np.bincount(starts, minlength=5)
    assert len(counts) == 5  # N = block + 5: five of them
    assert counts.min() > 1850
    assert counts.max() < 2150


def test_targets_are_inputs_one_later(tmp_path):
    """LDR-2"""
    with open_tokens(make(tmp_path / "t.bin", range(100))) as tokens:
        x, y = get_batch(tokens, np.array([0, 36, 91]), 8)
    assert x.tolist() == [list(range(s, s + 8)) for s in (0, 36, 91)]
    assert y.tolist() == [list(range(s + 1, s + 9)) for s in (0, 36, 91)]
    assert str(x.dtype) == str(y.dtype) == "torch.int64"
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_reading_outside_is_refused(tmp_path):
    with open_tokens(make(tmp_path / "t.bin", range(10))) as tokens:
        assert tokens.read(2, 8).tolist() == list(range(2, 10))
        for start, length in ((3, 8), (-1, 2)):
            with pytest.raises(IndexError):
                tokens.read(start, length)


def test_split_shorter_than_a_block(tmp_path):
    """LDR-1, DAT-18: split, tokens, block_size and what would fit; block_size + 1 tokens are enough."""
    with open_tokens(make(tmp_path / "t.bin", range(20))) as tokens:
        check_fits(tokens, 19, "val")
        with pytest.raises(ValueError) as error:
            check_fits(tokens, 32, "val")
    assert "val split has 20 tokens" in str(error.value)
    assert "--block_size=32" in str(error.value)
    assert "largest block_size that fits is 19" in str(error.value)
    with (
        open_tokens(make(tmp_path / "one.bin", [1])) as tokens,
        pytest.raises(ValueError, match="no block_size fits"),
    ):
        check_fits(tokens, 1, "train")


@pytest.mark.parametrize("n_tokens", [9, 10, 16, 17, 18, 100])
def test_whole_split_is_scored_exactly_once(tmp_path, n_tokens):
    with open_tokens(make(tmp_path / "t.bin", range(n_tokens))) as tokens:
        batches = list(eval_batches(tokens, block_size=8, n_windows=None, batch_size=3))
    scored = [i for _, y in batches for i in y.flatten().tolist()]
    assert scored == list(range(1, n_tokens))
    assert all((x + 1).equal(y) for x, y in batches)


def test_eval_windows_are_fixed_spread_and_apart():
    assert eval_windows(101, 10, 4).tolist() == [0, 20, 50, 70]
    assert eval_windows(101, 10, 10).tolist() == list(range(0, 100, 10))
    assert eval_windows(106, 10, 10).tolist() == list(range(0, 100, 10))
    assert eval_windows(106, 10, 99).tolist() == list(range(0, 110, 10))
    assert eval_windows(106, 10).tolist() == list(range(0, 110, 10))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, wants sparse files")
def test_resident_memory_stays_flat(tmp_path):
    """LDR-4, LDR-5: 5,000 batches all over a sparse 4 GB file, on one file handle."""

    def rss_bytes():
        with open("/proc/self/statm", encoding="utf-8") as file:
            return int(file.read().split()[1]) * 4096

    path = tmp_path / "big.bin"
    n_tokens = 2 * 2**30
    head = dict(ABOUT, version=1, dtype="uint16", n_tokens=n_tokens, max_id=9, vocab_size=10)
    path.write_bytes(pack_header(head))
    with open(path, "r+b") as file:
        file.truncate(len(pack_header(head)) + n_tokens * 2)
    with open_tokens(path) as tokens:
        handle = tokens._file
        get_batch(tokens, batch_starts(n_tokens, 64, 0, 0, 12), 64)
        before = rss_bytes()
        for step in range(5000):
            get_batch(tokens, batch_starts(n_tokens, 64, 0, step, 12), 64)
        assert rss_bytes() - before < 8 * 2**20
        assert tokens._file is handle


def test_pickles_and_threads(tmp_path):
    with open_tokens(make(tmp_path / "t.bin", range(1000))) as tokens:
        with pickle.loads(pickle.dumps(tokens)) as copy:
            assert copy.read(990, 10).tolist() == list(range(990, 1000))
        wrong = []

        def read_many(offset):
            for start in range(offset, 900, 7):
                if tokens.read(start, 50).tolist() != list(range(start, start + 50)):
                    wrong.append(start)

        threads = [threading.Thread(target=read_many, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
