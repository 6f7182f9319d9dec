"""Text from tokens, piece by piece."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_support import tiny_directory
from tokenizers import Tokenizer

from replica_agent.reference.detokenizer import Detokenizer, StopFilter


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(tiny_directory() / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def test_characters_of_several_tokens_come_whole(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂🙃 日本語 mañana " * 20
    tokens = tokenizer.encode(text).ids
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == text
    assert not any("�" in piece for piece in shown)
    assert len([piece for piece in shown if piece]) > len(text) / 10


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_give_the_text_of_them_all(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    # Single bytes are the first ids after the special ones: half of these sequences are not UTF-8.
    tokens = [rng.randrange(8, 264 if seed % 2 else 2048) for _ in range(120)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("the word").ids, 7, 1, *tokenizer.encode(" of").ids]
    assert "".join(pieces(tokenizer, tokens)) == "the word of"


def filtered(stops: tuple[str, ...], parts: list[str]) -> tuple[str, bool]:
    stop, shown = StopFilter(stops), ""
    for part in parts:
        text, met = stop.push(part)
        shown += text
        if met:
            return shown, True
    return shown + stop.finish(), False


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_text_is_cut_at_the_first_stop_however_it_comes(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, met = filtered(tuple(stops), parts)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert met == bool(ends)
    if not ends:
        assert shown == text
    else:
        # The stop that is complete first ends it; the text before any stop found by then is shown.
        assert text.startswith(shown)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)


def test_only_a_possible_beginning_is_held_back() -> None:
    stop = StopFilter(("END",))
    assert stop.push("text E") == ("text ", False)
    assert stop.push("Nothing") == ("ENothing", False)
    assert stop.push(" END more") == (" ", True)
