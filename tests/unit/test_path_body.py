"""The gateway reads a body without changing it, and refuses what could be read in two ways."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RequestError
from gateway.path.body import Body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(["a", "b", "c", "x,y", 'q"', "é", "}"])


@given(
    pairs=st.lists(st.tuples(KEYS, JSON), max_size=6),
    ascii_only=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\n ")]),
    remove=st.sets(KEYS),
)
def test_an_edited_body_reads_as_the_original_without_what_was_removed(pairs, ascii_only, separators, remove):
    comma, colon = separators
    parts = [json.dumps(k, ensure_ascii=ascii_only) + colon + json.dumps(v, ensure_ascii=ascii_only) for k, v in pairs]
    raw = ("{" + comma.join(parts) + "}").encode()
    body = Body(raw)
    assert [field.key for field in body.fields] == [key for key, _ in pairs]
    for field, part in zip(body.fields, parts, strict=True):
        assert raw[field.start : field.end].decode() == part
    expected = dict(pair for pair in pairs if pair[0] not in remove) | {"new": [1]}
    assert json.loads(body.edited(remove, {"new": b"[1]"})) == expected


def test_the_earlier_value_of_a_duplicate_ends_where_it_ends():
    body = Body(b'{"a":\t null ,\n"a": [] , "b":{"x":"}"} ,"b":-1.5e3 ,"b" : "z"}')
    assert [body.raw[f.value : f.end] for f in body.fields] == [b"null", b"[]", b'{"x":"}"}', b"-1.5e3", b'"z"']


def test_values_keep_their_spelling():
    raw = b'{"temperature" : 1.50, "big":10000000000000000000000, "u":"\\u2028\xe2\x80\xa8", "priority":1,"e":1E5 }'
    edited = Body(raw).edited({"priority"}, {})
    assert edited == b'{"temperature" : 1.50,"big":10000000000000000000000,"u":"\\u2028\xe2\x80\xa8","e":1E5}'


@pytest.mark.parametrize("key", ["model", "messages", "cache_salt", "stream", "kv_transfer_params", "priority"])
@pytest.mark.parametrize("values", [('"a"', '"b"'), ('"a"', '"a"'), ("[1, 2]", "[1]"), ('{"x":"}"}', "1")])
def test_a_second_spelling_of_an_owned_key_is_refused(key, values):
    escaped = f"\\u{ord(key[0]):04x}{key[1:]}"
    for second in (key, escaped):
        with pytest.raises(RequestError) as refused:
            Body(f'{{"{key}":{values[0]},"z":[],"{second}":{values[1]}}}'.encode())
        assert (refused.value.status, refused.value.code, refused.value.param) == (400, "duplicate_key", key)


def test_other_duplicates_pass_untouched():
    raw = b'{"user":"a","user":"b","model":"m","n":12,"n":1}'
    body = Body(raw)
    assert body.raw == raw
    assert body.edited({"absent"}, {}) == raw


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"null", b'{"a":1}{', b'{"a":}', b"{'a':1}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
)
def test_what_is_no_json_object_is_a_400(raw):
    with pytest.raises(RequestError) as refused:
        Body(raw)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"{" + b",".join(b'"k%d":1' % at for at in range(1001)) + b"}", "too_many_fields"),
        (b"{" + b",".join([b'"a":1'] * 1001) + b"}", "too_many_fields"),
        (b'{"a":[' + b"[]," * 40_000 + b'[]],"a":1}', "duplicate_key"),
    ],
)
def test_what_would_take_long_to_scan_is_refused(raw, code):
    with pytest.raises(RequestError) as refused:
        Body(raw)
    assert (refused.value.status, refused.value.code) == (400, code)


def test_long_keys_and_values_are_no_trouble():
    key = "k" * 1_000_000
    body = Body(json.dumps({key: 1, "v": "x" * 1_000_000, "w": [[]] * 100_000}).encode())
    assert [field.key for field in body.fields] == [key, "v", "w"]


def test_a_field_of_the_wrong_type_is_named():
    body = Body(b'{"model": 1, "stream": "yes", "x": null}')
    for read, key in ((body.string, "model"), (body.flag, "stream")):
        with pytest.raises(RequestError) as refused:
            read(key)
        assert (refused.value.status, refused.value.param) == (400, key)
    assert body.string("x") is None
    assert body.flag("absent", default=True) is True
