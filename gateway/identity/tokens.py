"""Token ids of a text, with those of long repeated segments remembered."""

from __future__ import annotations

import json
import re
import sys
from array import array
from collections import OrderedDict
from typing import Any

import msgspec
import xxhash
from tokenizers import Tokenizer

from gateway.errors import IdentityUnavailable
from kvstore.identity import pack_tokens

SHORT_SEGMENT = 24
"""Characters under which a segment is tokenized anew: looking it up would cost as much."""

_ENTRY_BYTES = 200
"""Memory of one cached segment besides its token ids: key, two objects, table and list links."""

_FREE_NORMALIZERS = frozenset(
    (
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Lowercase",
        "StripAccents",
        "Replace",
        "Strip",
        "BertNormalizer",
        "ByteLevel",
        "Sequence",
    )
)
_FREE_PRE_TOKENIZERS = frozenset(
    (
        "Split",
        "Digits",
        "Punctuation",
        "Whitespace",
        "WhitespaceSplit",
        "BertPreTokenizer",
        "CharDelimiterSplit",
        "UnicodeScripts",
        "ByteLevel",
        "Metaspace",
        "Sequence",
    )
)
_PROBES = (
    "",
    " ",
    "\n",
    "Hello world",
    " leading and trailing ",
    "\n\ntwo  spaces\tand\ttabs\r\n  indented\n",
    "naïve café, Straße, ﬁne, Å vs Å, 你好世界, こんにちは, مرحبا, 👩‍👩‍👧 🇩🇪",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": None}  # 12345678901\n",
    "it's I'LL we've 'quoted' don't",
    "< |im_start| > <|im_start <|unknown|> </s <s",
    "a" * 300,
)


class CacheStats(msgspec.Struct, array_like=True):
    """Lookups of a segment cache that hit and missed since it was made, and what it holds now."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    entries: int = 0


class SegmentCache:
    """Token ids of text segments, the least recently used forgotten first.

    Owns the packed ids; several tokenizers share one cache, told apart by the seed of their keys. A returned value is
    immutable and stays valid after it was evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.stats = CacheStats()

    def get(self, key: bytes) -> bytes | None:
        """The packed ids stored under `key`."""
        packed = self._entries.get(key)
        if packed is None:
            self.stats.misses += 1
            return None
        self._entries.move_to_end(key)
        self.stats.hits += 1
        return packed

    def put(self, key: bytes, packed: bytes) -> None:
        """Stores ids, unless they alone are over the bound."""
        size = len(packed) + _ENTRY_BYTES
        if size > self._max_bytes or key in self._entries:
            return
        self._entries[key] = packed
        self.stats.bytes += size
        while self.stats.bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.stats.bytes -= len(evicted) + _ENTRY_BYTES
        self.stats.entries = len(self._entries)

    def check(self) -> None:
        """Bytes accounted for are those held, and within the bound."""
        held = sum(len(packed) + _ENTRY_BYTES for packed in self._entries.values())
        assert self.stats.bytes == held <= self._max_bytes, (self.stats, held)
        assert self.stats.entries == len(self._entries)


class SegmentTokenizer:
    """A model's tokenizer. Owns it; the cache is shared.

    Added special tokens split a text before anything else looks at it, so the ids of a text are those of its segments
    put together. That is used only where it is provably so: `whole_because` says why a tokenizer is not segmented, ""
    if it is. Raises IdentityUnavailable("bad_tokenizer").
    """

    def __init__(
        self, tokenizer_json: bytes, cache: SegmentCache, *, add_bos: bool | None = None, bos: str | None = None
    ) -> None:
        try:
            description = json.loads(tokenizer_json)
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        except Exception as error:  # the library raises bare Exception
            raise IdentityUnavailable("bad_tokenizer", str(error)[:500]) from error
        # Engines never cut or pad a prompt because its tokenizer file says so.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache = SegmentCache(1 << 20)
        self._seed = xxhash.xxh3_64_intdigest(tokenizer_json)
        self._special: dict[str, bytes] = {}
        self._cut: re.Pattern[str] | None = None
        self.whole_because = self._prepare(description)
        self._around = self._surroundings(add_bos, bos)
        self._cache = cache  # only now: what was tried above is worth no room in it

    def encode(self, text: str) -> bytes:
        """Packed ids of `text` alone. Raises IdentityUnavailable("tokenizer_error")."""
        if self._cut is None:
            return self._whole(text)
        parts: list[bytes] = []
        missing: list[tuple[int, bytes | None, str]] = []
        for index, piece in enumerate(self._cut.split(text)):
            if index % 2:
                parts.append(self._special[piece])
            elif piece:
                key = None
                if len(piece) >= SHORT_SEGMENT:
                    key = self._key(piece)
                    if (packed := self._cache.get(key)) is not None:
                        parts.append(packed)
                        continue
                missing.append((len(parts), key, piece))
                parts.append(b"")
        for (place, key, _), packed in zip(missing, self._many([piece for _, _, piece in missing]), strict=True):
            parts[place] = packed
            if key is not None:
                self._cache.put(key, packed)
        return b"".join(parts)

    def encode_prompt(self, text: str) -> bytes:
        """Packed ids of a completion prompt, with the special tokens that the tokenizer's post-processor adds."""
        if self._around is None:
            try:
                return pack_tokens(self._tokenizer.encode(text, add_special_tokens=True).ids)
            except Exception as error:
                raise IdentityUnavailable("tokenizer_error", str(error)[:500]) from error
        before, after = self._around
        return before + self.encode(text) + after

    def _key(self, piece: str) -> bytes:
        try:
            return xxhash.xxh3_128_digest(piece.encode(), self._seed)
        except UnicodeEncodeError as error:
            raise IdentityUnavailable("tokenizer_error", "text with a lone surrogate") from error

    def _many(self, texts: list[str]) -> list[bytes]:
        if not texts:
            return []
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception; lone surrogates raise TypeError
            raise IdentityUnavailable("tokenizer_error", str(error)[:500]) from error
        return [pack_tokens(encoding.ids) for encoding in encodings]

    def _whole(self, text: str) -> bytes:
        return self._many([text])[0]

    def _prepare(self, description: dict[str, Any]) -> str:
        """Builds the segment pattern; returns why it may not be used."""
        special = {
            token["content"]: token for token in description.get("added_tokens") or () if not token["normalized"]
        }
        for token in special.values():
            if token["lstrip"] or token["rstrip"] or token["single_word"]:
                return f"added token {token['content']!r} takes text beside it"
        special.pop("", None)
        if not special:
            return "no special tokens"
        if reason := _context(description):
            return reason
        self._special = {content: pack_tokens([token["id"]]) for content, token in special.items()}
        # The library takes the leftmost, then the longest match; of alternatives, re takes the first.
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(longest_first)})")
        for text in self._probe_texts(list(special)):
            if self.encode(text) != self._whole(text):
                self._cut = None
                return "segments tokenize differently from the whole"
        return ""

    @staticmethod
    def _probe_texts(special: list[str]) -> list[str]:
        """Probes beside, between and around special tokens, and special tokens beside each other and cut short."""
        marks = special[:64]
        first, last = marks[0], marks[-1]
        texts = list(_PROBES)
        texts += [f"{first}{probe}{last}{other}{first}" for probe in _PROBES for other in _PROBES]
        texts += [f"x{mark} y{mark}{mark}\n{mark[:-1]} {mark[1:]}{mark} z" for mark in marks]
        texts.append("".join(marks))
        return texts

    def _surroundings(self, add_bos: bool | None, bos: str | None) -> tuple[bytes, bytes] | None:
        """What the post-processor puts before and after a text; None when that depends on the text."""
        found: set[tuple[bytes, bytes]] = set()
        for text in ("a b c", "Hello world", "\n1, 2"):
            plain = self._tokenizer.encode(text, add_special_tokens=False).ids
            added = self._tokenizer.encode(text, add_special_tokens=True).ids
            starts = [at for at in range(len(added) - len(plain) + 1) if added[at : at + len(plain)] == plain]
            if len(starts) != 1:
                return None
            at = starts[0]
            found.add((pack_tokens(added[:at]), pack_tokens(added[at + len(plain) :])))
        if len(found) != 1:
            return None
        before, after = found.pop()
        bos_id = self._tokenizer.token_to_id(bos) if bos is not None else None
        if add_bos is not None and bos_id is not None:
            # transformers builds the post-processor anew when the configuration names add_bos_token.
            before = pack_tokens([bos_id]) if add_bos else b""
        return before, after


def _components(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer and all that it is made of."""
    if node is None:
        return []
    inner = node.get("normalizers") or node.get("pretokenizers") or ()
    return [node, *(component for child in inner for component in _components(child))]


def _context(description: dict[str, Any]) -> str:
    """Why ids of a segment may depend on what stands around it, "" if they cannot."""
    for node in _components(description.get("normalizer")):
        if node["type"] not in _FREE_NORMALIZERS:
            return f"normalizer {node['type']}"
    for node in _components(description.get("pre_tokenizer")):
        kind = node["type"]
        if kind not in _FREE_PRE_TOKENIZERS or (kind == "ByteLevel" and node.get("add_prefix_space")):
            return f"pre-tokenizer {kind}"
        if kind == "Metaspace" and node.get("prepend_scheme", "always") == "first":
            return "pre-tokenizer Metaspace looks at the first word"
    if (description.get("model") or {}).get("dropout"):
        return "dropout makes ids random"
    return ""


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
