"""Hints: signed by the deployment, and sensible."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvstore.errors import HintRefused
from kvstore.hint import MAX_DEADLINE_MS, Hint

HINT = Hint(request="r-1", source="replica-a", url="http://10.0.0.1:7000", blocks=12, deadline_ms=900)
SECRET = "deployment"


def test_a_signed_hint_passes_and_survives_json() -> None:
    signed = HINT.signed(SECRET)
    signed.check(SECRET)
    msgspec.json.decode(msgspec.json.encode(signed), type=Hint).check(SECRET)
    assert signed.mac and signed == HINT.signed(SECRET)


def test_without_a_secret_hints_carry_no_mac_and_none_is_asked_for() -> None:
    assert HINT.signed("") == HINT
    HINT.check("")
    HINT.signed(SECRET).check("")


CHANGED: dict[str, Any] = {
    "request": "r-2",
    "source": "replica-b",
    "url": "http://10.0.0.2:7000",
    "blocks": 13,
    "deadline_ms": 901,
}


def test_every_field_is_changed() -> None:
    assert CHANGED.keys() == set(Hint.__struct_fields__) - {"mac"}


@pytest.mark.parametrize("field", CHANGED)
def test_a_hint_that_was_changed_is_refused(field: str) -> None:
    with pytest.raises(HintRefused, match=r"^mac: "):
        msgspec.structs.replace(HINT.signed(SECRET), **{field: CHANGED[field]}).check(SECRET)


@pytest.mark.parametrize("mac", ["", "x", "0" * 32, "ü" * 32, HINT.signed("another").mac])
def test_a_hint_that_is_not_the_deployments_is_refused(mac: str) -> None:
    with pytest.raises(HintRefused, match=r"^mac: "):
        msgspec.structs.replace(HINT, mac=mac).check(SECRET)


def test_fields_cannot_run_into_each_other() -> None:
    one = msgspec.structs.replace(HINT, request="ab", source="c").signed(SECRET)
    assert one.mac != msgspec.structs.replace(HINT, request="a", source="bc").signed(SECRET).mac


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("url", ""),
        ("url", "file:///etc"),
        ("url", "10.0.0.1:7000"),
        ("blocks", 0),
        ("blocks", -1),
        ("deadline_ms", 0),
        ("deadline_ms", MAX_DEADLINE_MS + 1),
    ],
)
@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_hint_that_makes_no_sense_is_refused_by_field(field: str, value: object, secret: str) -> None:
    with pytest.raises(HintRefused, match=f"^{field}: "):
        msgspec.structs.replace(HINT, **{field: value}).signed(secret).check(secret)


@pytest.mark.parametrize(
    ("field", "value"),
    [("blocks", 10**30), ("blocks", -1), ("deadline_ms", 2**31), ("request", "r" * 1_025), ("url", 5), ("mac", None)],
)
def test_what_nobody_sends_is_no_hint(field: str, value: object) -> None:
    told = {**msgspec.to_builtins(HINT), field: value}
    with pytest.raises(msgspec.ValidationError, match=rf"\$\.{field}"):
        msgspec.json.decode(json.dumps(told), type=Hint)
