"""Segment tokenization against whole tokenization."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from identity_support import model_files
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.errors import IdentityUnavailable
from gateway.identity.tokens import SegmentCache, SegmentTokenizer, unpack_tokens
from kvstore.identity import pack_tokens

WORDS = {word: place for place, word in enumerate(["[UNK]", "a", "b", "c", "Hello", "world", "▁a", "▁b", "▁", ","])}


@cache
def real(name: str) -> tuple[SegmentTokenizer, Tokenizer]:
    raw = model_files(name).tokenizer_json
    return SegmentTokenizer(raw, SegmentCache(1 << 20)), Tokenizer.from_str(raw.decode())


def small(**parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, value in parts.items():
        setattr(tokenizer, name, value)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def segmenting(tokenizer: Tokenizer, **options: Any) -> SegmentTokenizer:
    return SegmentTokenizer(tokenizer.to_str().encode(), SegmentCache(1 << 20), **options)


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_real_tokenizers_are_segmented(name: str) -> None:
    assert real(name)[0].whole_because == ""


SPECIALS = {"smollm2": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], "tiny": ["<|bos|>", "<|user|>", "<|end|>"]}


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_segments_give_the_ids_of_the_whole(name: str, data: st.DataObject) -> None:
    marks = SPECIALS[name]
    pieces = st.one_of(
        st.sampled_from([*marks, *(mark[:-1] for mark in marks), *(mark[1:] for mark in marks), " ", "\n", "  \n"]),
        st.text(max_size=40),
        st.text("ab \n'.<|>1é你", max_size=80),
    )
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    ours, whole = real(name)
    expected = whole.encode(text, add_special_tokens=False).ids
    assert unpack_tokens(ours.encode(text)) == expected
    assert unpack_tokens(ours.encode(text)) == expected  # from the cache
    assert unpack_tokens(ours.encode_prompt(text)) == whole.encode(text, add_special_tokens=True).ids


def test_a_repeated_segment_is_tokenized_once() -> None:
    cache = SegmentCache(1 << 20)
    tokenizer = SegmentTokenizer(model_files("smollm2").tokenizer_json, cache)
    assert cache.stats.entries == 0
    document = "<|im_start|>user\n" + "A long document. " * 500 + "<|im_end|>"
    tokenizer.encode(document)
    assert (cache.stats.hits, cache.stats.misses) == (0, 1)
    tokenizer.encode(document + "<|im_start|>assistant\nA first answer, remembered<|im_end|>")
    assert (cache.stats.hits, cache.stats.misses, cache.stats.entries) == (1, 2, 2)
    cache.check()


def test_overlapping_special_tokens_match_the_longest_first() -> None:
    tokenizer = small()
    tokenizer.add_special_tokens(["<s>>", "<s", "s>"])
    ours = segmenting(tokenizer)
    assert ours.whole_because == ""
    for text in ("<s>> a", "<s> a <s", "a<<s>>>s> b", "<<s>"):
        assert unpack_tokens(ours.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("parts", "token", "why"),
    [
        ({}, AddedToken("<x>", lstrip=True, special=True, normalized=False), "text beside"),
        ({}, AddedToken("<x>", rstrip=True, special=True, normalized=False), "text beside"),
        ({}, AddedToken("<x>", single_word=True, special=True, normalized=False), "text beside"),
        ({"normalizer": normalizers.Prepend("▁")}, None, "normalizer Prepend"),
        ({"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("▁")])}, None, "Prepend"),
        ({"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first")}, None, "Metaspace"),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, None, "ByteLevel"),
    ],
)
def test_what_depends_on_its_surroundings_is_not_segmented(parts: Any, token: AddedToken | None, why: str) -> None:
    tokenizer = small(**parts)
    if token is not None:
        tokenizer.add_tokens([token])
    ours = segmenting(tokenizer)
    assert why in ours.whole_because
    for text in ("a <x> b<s>a b</s> a", "<s>a", "Hello world"):
        assert unpack_tokens(ours.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_dropout_is_not_segmented() -> None:
    raw = json.loads(model_files("tiny").tokenizer_json)
    raw["model"]["dropout"] = 0.1
    assert "random" in SegmentTokenizer(json.dumps(raw).encode(), SegmentCache(1 << 20)).whole_because


def test_without_special_tokens_there_is_nothing_to_cut() -> None:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert segmenting(tokenizer).whole_because == "no special tokens"


def test_limits_of_the_file_do_not_cut_prompts() -> None:
    tokenizer = small(decoder=decoders.Fuse())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    assert unpack_tokens(segmenting(tokenizer).encode("a b c a")) == [1, 2, 3, 1]


@pytest.mark.parametrize(
    ("add_bos", "before"), [(None, ["<s>"]), (True, ["<s>"]), (False, [])], ids=["file", "forced", "off"]
)
def test_prompts_get_the_special_tokens_of_the_post_processor(add_bos: bool | None, before: list[str]) -> None:
    tokenizer = small()
    start, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    ours = segmenting(tokenizer, add_bos=add_bos, bos="<s>")
    expected = [*(tokenizer.token_to_id(token) for token in before), 1, 2, end]
    assert unpack_tokens(ours.encode_prompt("a b")) == expected
    assert unpack_tokens(ours.encode("a b")) == [1, 2]


def test_lone_surrogates_are_refused() -> None:
    for text in ("\ud800", "a long text with a lone surrogate \udfff in it", "<|im_end|>\ud800<|im_end|>"):
        with pytest.raises(IdentityUnavailable, match=r"."):
            real("smollm2")[0].encode(text)


@pytest.mark.parametrize("raw", [b"", b"{}", b"null", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(raw: bytes) -> None:
    with pytest.raises(IdentityUnavailable) as refusal:
        SegmentTokenizer(raw, SegmentCache(1 << 20))
    assert refusal.value.reason == "bad_tokenizer"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 900)), max_size=80))
def test_the_cache_stays_within_its_bytes(entries: list[tuple[int, int]]) -> None:
    cache = SegmentCache(4000)
    recent: dict[int, bytes] = {}
    for number, length in entries:
        key, packed = number.to_bytes(16, "big"), pack_tokens([number] * length)
        if cache.get(key) is None:
            cache.put(key, packed)
            recent[number] = packed
        cache.check()
    for number, packed in recent.items():
        assert cache.get(number.to_bytes(16, "big")) in (None, packed)
