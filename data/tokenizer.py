"""Three tokenizers behind one class. tiktoken does all encoding and decoding, for each of them:

  char   one token per character of the corpus
  bpe    byte-pair encoding trained on the corpus (rustbpe trains, tiktoken encodes); 256 = plain bytes
  gpt2   OpenAI's 50,256 published tokens

Each has one more id on top, the end-of-text id, which stands between documents. A tokenizer is plain data
(a split pattern and a list of byte strings), so it fits in a JSON file and in a checkpoint, and needs no
network to come back.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

EOT = "<|endoftext|>"
MAX_TOKENS = 1_000_000

CHAR_PATTERN = r"(?s:.)"

# How text is cut before byte pairs are merged; no token crosses a cut. Written with source code in mind:
# indentation belongs to the line break before it, so that "newline and eight blanks" can be one token.
# There is no look-ahead and each alternative starts on characters of its own, so matching is linear.
BPE_PATTERN = (
    r"[ \t\p{P}\p{S}]?\p{L}[\p{L}\p{M}]*"  # a word, one blank or mark before it: " self", ".join"
    r"|\p{N}{1,3}"  # digits, three at most
    r"| ?[^\s\p{L}\p{N}]+(?:[\r\n]+[ \t]*)?"  # marks, and the line break after them: "):\n        "
    r"|[\r\n]+[ \t]*"  # line breaks and the indentation that follows
    r"|[^\S\r\n]+"  # any other blanks
)

# GPT-2's pattern as tiktoken has it since version 0.9, and before. Both cut alike.
GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
)
GPT2_PATTERN_BEFORE = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# A file may only name one of these. Any other could lose text, take for ever, or bring tiktoken down.
PATTERNS = {"char": (CHAR_PATTERN,), "bpe": (BPE_PATTERN,), "gpt2": (GPT2_PATTERN, GPT2_PATTERN_BEFORE)}

# The files tiktoken needs for GPT-2. It caches each under the SHA-1 of its address.
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = ("vocab.bpe", "encoder.json")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back. Ids 0 .. vocab_size - 2 are tokens, vocab_size - 1 is the end-of-text id."""

    kind: str  # "char" | "bpe" | "gpt2"
    pattern: str  # regular expression that cuts text into pieces
    ranks: tuple[bytes, ...]  # the bytes of each token, in id order (for bpe this is also the merge order)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-text id included."""
        return len(self.ranks) + 1

    @property
    def eot_id(self) -> int:
        """Id of the end-of-text marker: the last one."""
        return len(self.ranks)

    @cached_property
    def _encoding(self) -> Any:
        import tiktoken

        return tiktoken.Encoding(
            f"headcount-{self.kind}",
            pat_str=self.pattern,
            mergeable_ranks={token: i for i, token in enumerate(self.ranks)},
            special_tokens={EOT: self.eot_id},
        )

    @cached_property
    def _characters(self) -> frozenset[str]:
        return frozenset(token.decode("utf-8") for token in self.ranks)

    def encode(self, text: str, allow_eot: bool = False) -> list[int]:
        """Ids of a text. The marker `<|endoftext|>` in it is plain text, unless allow_eot makes it the id.

        ValueError for a lone surrogate and, with kind "char", for a character outside the vocabulary.
        """
        self._check(text, allow_eot)
        special = {EOT} if allow_eot else set()
        return self._encoding.encode(text, allowed_special=special, disallowed_special=())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts on tiktoken's own threads (no child processes); markers are plain text."""
        for text in texts:
            self._check(text, allow_eot=False)
        return self._encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes the ids stand for; ValueError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        for i in ids:
            # tiktoken would raise a bare KeyError, or panic on a negative id.
            if not 0 <= i < self.vocab_size:
                raise ValueError(
                    f"token id {i} is outside this {self.kind} tokenizer's {self.vocab_size} ids"
                )
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes per id, int64 (vocab_size,); the end-of-text id counts 0. For loss in bits per byte."""
        return np.array([len(token) for token in self.ranks] + [0], dtype=np.int64)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON: two tokenizers with the same hash give the same ids."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Each token's bytes are written as Latin-1, so that most tokens can be read.

        gpt2 stores its 50,256 tokens too (about 0.5 MB): a checkpoint must open without a network.
        """
        ranks = [token.decode("latin-1") for token in self.ranks]
        return {"kind": self.kind, "pattern": self.pattern, "eot": EOT, "ranks": ranks}

    @staticmethod
    def from_dict(d: Any) -> Tokenizer:
        """The tokenizer that `to_dict` described; ValueError when anything about it is wrong."""
        if not isinstance(d, dict):
            raise ValueError("tokenizer: expected a JSON object")
        kind, pattern, ranks = d.get("kind"), d.get("pattern"), d.get("ranks")
        if not isinstance(kind, str) or kind not in PATTERNS:
            found = repr(kind[:40]) if isinstance(kind, str) else type(kind).__name__
            raise ValueError(f"tokenizer: kind is {found}, expected char, bpe or gpt2")
        if d.get("eot") != EOT:
            raise ValueError(f"tokenizer: the end-of-text marker is not {EOT}")
        if not isinstance(pattern, str) or pattern not in PATTERNS[kind]:
            raise ValueError(f"tokenizer: the pattern is none that this version knows for {kind}")
        if not isinstance(ranks, list) or not 0 < len(ranks) <= MAX_TOKENS:
            raise ValueError(f"tokenizer: ranks is not a list of 1 to {MAX_TOKENS:,} tokens")
        tokens = tuple(_token_from_json(i, token) for i, token in enumerate(ranks))
        tokenizer = Tokenizer(kind, pattern, tokens)
        _check_ranks(tokenizer)
        return tokenizer

    def _check(self, text: str, allow_eot: bool) -> None:
        if not text.isascii():
            _check_unicode(text)
        if self.kind != "char":
            return
        unknown = set(text) - self._characters
        if unknown and allow_eot:
            # The characters of the marker itself need not be known where the marker becomes an id. A stand-in
            # of the same length that is known keeps the positions right.
            text = text.replace(EOT, self.ranks[0].decode("utf-8") * len(EOT))
            unknown = set(text) - self._characters
        if unknown:
            at = {c: text.index(c) for c in unknown}
            first = sorted(unknown, key=at.__getitem__)
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in first[:5])
            names += ", ..." if len(first) > 5 else ""
            raise ValueError(
                f"text has {len(first)} character(s) that are not among the {len(self.ranks)} of this char "
                f"tokenizer: {names}; first at position {at[first[0]]}: leave them out, or train with "
                "--tokenizer=bpe"
            )


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer whose tokens are the distinct characters (code points) of the texts, sorted."""
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    if not characters:
        raise ValueError("char tokenizer: no text to take characters from")
    _check_unicode("".join(characters))
    return Tokenizer("char", CHAR_PATTERN, tuple(c.encode("utf-8") for c in sorted(characters)))


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-pair encoding trained on the texts.

    vocab_size counts the ordinary tokens, of which the first 256 are the single bytes (256 = bytes only);
    the end-of-text id comes on top. A small corpus runs out of pairs to merge: then there are fewer tokens.
    """
    if not 256 <= vocab_size <= MAX_TOKENS:
        raise ValueError(
            f"--vocab_size={vocab_size}: a bpe tokenizer takes 256 (plain bytes) to {MAX_TOKENS:,}"
        )
    ranks = tuple(bytes([i]) for i in range(256))
    if vocab_size > 256:
        import rustbpe

        def checked() -> Iterable[str]:
            for text in texts:
                _check_unicode(text)
                yield text

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(checked(), vocab_size, pattern=BPE_PATTERN)
        by_id = sorted((i, bytes(token)) for token, i in trainer.get_mergeable_ranks())
        ranks = tuple(token for _, token in by_id)
    tokenizer = Tokenizer("bpe", BPE_PATTERN, ranks)
    _check_ranks(tokenizer)
    return tokenizer


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's tokenizer, from tiktoken's cache or, once, from the network; ValueError when it has neither."""
    import tiktoken

    try:
        if not _gpt2_is_cached():
            # tiktoken's own download has no time limit; this look at the address has one.
            import requests

            requests.head(GPT2_URL + GPT2_FILES[0], timeout=5).raise_for_status()
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        # requests' errors are OSErrors; tiktoken reports a damaged download as a ValueError.
        raise ValueError(
            "the gpt2 tokenizer is not in tiktoken's cache and cannot be fetched here "
            f"({type(error).__name__}): where there is a network run TIKTOKEN_CACHE_DIR=tiktoken_cache "
            "python -c \"import tiktoken; tiktoken.get_encoding('gpt2')\", copy that folder here and set "
            "TIKTOKEN_CACHE_DIR to it; or train with --tokenizer=bpe"
        ) from error
    ranks = tuple(encoding.decode_single_token_bytes(i) for i in range(encoding.eot_token))
    return Tokenizer("gpt2", GPT2_PATTERN, ranks)


def _gpt2_is_cached() -> bool:
    import tempfile

    default = f"{tempfile.gettempdir()}/data-gym-cache"
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    names = (hashlib.sha1((GPT2_URL + name).encode("utf-8")).hexdigest() for name in GPT2_FILES)
    return all(Path(folder, name).exists() for name in names)


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # tiktoken would put U+FFFD in its place without a word, and decode(encode(text)) would differ.
        raise ValueError(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at position {error.start}, "
            "which is no character: read the text as UTF-8"
        ) from None


def _token_from_json(i: int, token: Any) -> bytes:
    try:
        if not token:
            raise TypeError("empty")
        return token.encode("latin-1")
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise ValueError(f"tokenizer: token {i} is not a text of characters U+0000 to U+00FF") from None


def _check_ranks(tokenizer: Tokenizer) -> None:
    """ValueError unless the tokens make a tokenizer that can encode whatever its kind promises."""
    ranks = tokenizer.ranks
    if len(set(ranks)) != len(ranks):
        raise ValueError("tokenizer: the same token appears twice")
    if tokenizer.kind == "char":
        try:
            single = all(len(token.decode("utf-8")) == 1 for token in ranks)
        except UnicodeDecodeError:
            single = False
        if not single:
            raise ValueError("tokenizer: a token of a char tokenizer is not one character")
    elif sum(len(token) == 1 for token in ranks) != 256:
        raise ValueError(f"tokenizer: a {tokenizer.kind} tokenizer must hold all 256 single bytes")
