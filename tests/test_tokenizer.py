"""data/tokenizer.py: round trips, the end-of-text id, unknown characters, storage, no network."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import EOT, Tokenizer, bpe_tokenizer, char_tokenizer, gpt2_tokenizer

SHARED_TIKTOKEN = Path(__file__).resolve().parents[2] / "shared" / "tiktoken"
CODE = "def f(self, x):\r\n        return self.x + 'é—💡'  # it's 12345\n\n    a\u0301\tb\n"
BPE = bpe_tokenizer([CODE * 20], 280)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)


@pytest.fixture
def gpt2(monkeypatch):
    if not SHARED_TIKTOKEN.is_dir():
        pytest.skip("no tiktoken cache in ../shared/tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_TIKTOKEN))
    return gpt2_tokenizer()


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_bpe_round_trip_is_exact_for_any_text(text):
    """DAT-1: bytes in = bytes out, also for text unlike the corpus."""
    assert BPE.decode_bytes(BPE.encode(text)) == text.encode("utf-8")
    assert BPE.decode(BPE.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(TEXT.filter(bool))
def test_char_round_trip_is_exact_and_one_id_per_character(text):
    """DAT-1"""
    tokenizer = char_tokenizer([text])
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert tokenizer.vocab_size == len(set(text)) + 1


@pytest.mark.parametrize(
    "text", ["a\r\nb\rc\n", "💡👩\u200d🚀", "\u0301lone mark", "\ufeffbom", "é—", "\0", ""]
)
def test_round_trip_of_awkward_texts(text, gpt2):
    """DAT-1"""
    for tokenizer in (BPE, gpt2, char_tokenizer([text + "x"])):
        assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode("utf-8")


def test_gpt2_ids_are_the_published_ones(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.eot_id) == (50257, 50256)
    assert gpt2.encode("a" + EOT) == [64, 27, 91, 437, 1659, 5239, 91, 29]
    assert gpt2.encode("a" + EOT, allow_eot=True) == [64, 50256]


def test_char_ids_are_sorted_characters():
    tokenizer = char_tokenizer(["ba", "cé"])
    assert tokenizer.encode("abcé") == [0, 1, 2, 3]
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (4, 5)


@pytest.mark.parametrize("tokenizer", [BPE, char_tokenizer([EOT + "ab"])], ids=["bpe", "char"])
def test_end_of_text_marker_is_plain_text_unless_allowed(tokenizer):
    """DAT-6"""
    plain = tokenizer.encode("a" + EOT + "b")
    assert tokenizer.eot_id not in plain
    assert tokenizer.decode(plain) == "a" + EOT + "b"
    assert tokenizer.encode_batch(["a" + EOT + "b"]) == [plain]
    one_id = tokenizer.encode("a" + EOT + "b", allow_eot=True)
    assert one_id == [*tokenizer.encode("a"), tokenizer.eot_id, *tokenizer.encode("b")]


def test_char_marker_as_id_needs_none_of_its_characters():
    """DAT-6 with DAT-10: the marker's own characters may be unknown, others not, at the right position."""
    tokenizer = char_tokenizer(["ab"])
    assert tokenizer.encode("a" + EOT + "b", allow_eot=True) == [0, 2, 1]
    with pytest.raises(ValueError, match=r"'z' \(U\+007A\); first at position 14"):
        tokenizer.encode("a" + EOT + "z", allow_eot=True)
    with pytest.raises(ValueError, match="10 character"):
        tokenizer.encode("a" + EOT)


def test_unknown_characters_are_named_with_the_first_position():
    """DAT-10"""
    tokenizer = char_tokenizer(["hello "])
    with pytest.raises(ValueError) as error:
        tokenizer.encode("helHo?é")
    message = str(error.value)
    assert "3 character(s)" in message
    assert "'H' (U+0048), '?' (U+003F), 'é' (U+00E9); first at position 3" in message
    assert "--tokenizer=bpe" in message
    assert "\n" not in message
    with pytest.raises(ValueError, match=r"\(U\+0045\), \.\.\.; first at position 0"):
        tokenizer.encode("ABCDEFG")


@pytest.mark.parametrize("tokenizer", [BPE, char_tokenizer(["ab"])], ids=["bpe", "char"])
def test_lone_surrogate_is_refused(tokenizer):
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(ValueError, match=r"lone surrogate U\+D800 at position 1"):
            encode("a\ud800")


def test_building_from_surrogates_or_nothing_is_refused():
    with pytest.raises(ValueError, match="lone surrogate"):
        char_tokenizer(["a\udfff"])
    with pytest.raises(ValueError, match="lone surrogate"):
        bpe_tokenizer(["a\udfff"], 300)
    with pytest.raises(ValueError, match="no text"):
        char_tokenizer([""])


@pytest.mark.parametrize("ids", [[0, -1], [BPE.vocab_size], [10**12]])
def test_decode_refuses_ids_outside_the_vocabulary(ids):
    """DAT-9: never a crash inside tiktoken."""
    with pytest.raises(ValueError, match=f"outside this bpe tokenizer's {BPE.vocab_size} ids"):
        BPE.decode(ids)


def test_decode_takes_numpy_ids_and_replaces_cut_characters():
    assert BPE.decode(np.array([97, 98], dtype=np.uint16)) == "ab"
    assert BPE.decode([0xC3]) == "\ufffd"
    assert BPE.decode([BPE.eot_id]) == EOT


def test_bpe_size_counts_ordinary_tokens_and_256_is_bytes():
    plain = bpe_tokenizer(["anything"], 256)
    assert plain.encode("aé") == [97, 0xC3, 0xA9]
    assert (plain.vocab_size, plain.eot_id) == (257, 256)
    assert BPE.vocab_size == 281
    small = bpe_tokenizer(["abab"], 1000)  # three pairs at most can be merged
    assert 257 <= small.vocab_size < 270
    assert small.decode(small.encode("abab")) == "abab"
    with pytest.raises(ValueError, match="--vocab_size=255"):
        bpe_tokenizer(["a"], 255)


def test_bpe_pieces_fit_code():
    """A line break with its indentation can be one token; a word never crosses into the next."""
    tokenizer = bpe_tokenizer(["x\n        return self.value\n" * 50], 400)
    tokens = [tokenizer.decode_bytes([i]) for i in tokenizer.encode("x\n        return self.value")]
    assert tokens == [b"x", b"\n        ", b"return", b" self", b".value"]


def test_bpe_training_is_deterministic():
    """DAT-17"""
    texts = [CODE, "the cat sat on the mat " * 9, "zażółć gęślą jaźń " * 5]
    assert bpe_tokenizer(texts, 350).hash == bpe_tokenizer(texts, 350).hash


def test_token_bytes_sum_to_the_text():
    ids = BPE.encode(CODE)
    assert BPE.token_bytes()[ids].sum() == len(CODE.encode("utf-8"))
    assert BPE.token_bytes().shape == (BPE.vocab_size,)
    assert BPE.token_bytes()[BPE.eot_id] == 0


def test_json_round_trip_keeps_ids_and_hash(gpt2):
    for tokenizer in (BPE, char_tokenizer([CODE]), gpt2):
        back = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert back == tokenizer
        assert back.hash == tokenizer.hash
        assert back.encode(CODE) == tokenizer.encode(CODE)
    assert BPE.hash != char_tokenizer([CODE]).hash


GOOD = char_tokenizer(["ab"]).to_dict()


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        "x",
        {},
        {**GOOD, "kind": "word"},
        {**GOOD, "kind": ["char"]},
        {**GOOD, "eot": "</s>"},
        {**GOOD, "pattern": ""},
        {**GOOD, "pattern": 3},
        {**GOOD, "pattern": "x" * 5000},
        {**GOOD, "pattern": "("},
        {**GOOD, "ranks": []},
        {**GOOD, "ranks": "ab"},
        {**GOOD, "ranks": ["a", "a"]},
        {**GOOD, "ranks": ["a", ""]},
        {**GOOD, "ranks": ["a", 1]},
        {**GOOD, "ranks": ["a", "\u0100"]},
        {**GOOD, "ranks": ["ab"]},
        {**GOOD, "ranks": ["\xff"]},
        {**GOOD, "kind": "bpe"},
        {**BPE.to_dict(), "pattern": "("},
        {**BPE.to_dict(), "ranks": BPE.to_dict()["ranks"][1:]},
    ],
)
def test_junk_is_refused_with_one_line(junk):
    with pytest.raises(ValueError) as error:
        Tokenizer.from_dict(junk)
    assert str(error.value).startswith("tokenizer: ")
    assert "\n" not in str(error.value)


def test_gpt2_without_cache_and_network_names_the_variable(monkeypatch, tmp_path):
    """DAT-8 (b)"""
    import requests

    def no_network(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setattr(requests, "head", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ValueError) as error:
        gpt2_tokenizer()
    assert "TIKTOKEN_CACHE_DIR" in str(error.value)
    assert "tiktoken.get_encoding('gpt2')" in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_char_and_bpe_never_touch_the_network(monkeypatch):
    """DAT-8 (a)"""

    def refuse(*args):
        raise AssertionError("network touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for tokenizer in (char_tokenizer([CODE]), bpe_tokenizer([CODE], 280)):
        back = Tokenizer.from_dict(tokenizer.to_dict())
        assert back.decode(back.encode(CODE)) == CODE


def test_one_piece_of_many_characters_is_no_trap():
    """The merge of a very long piece must not be quadratic: that would be minutes."""
    tokenizer = bpe_tokenizer(["a" * 5000], 260)
    for text in ("a" * 400_000, " " * 400_000, "\n" * 400_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
