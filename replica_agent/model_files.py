"""The tokenizer files of the model an engine serves, as gateways need them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from kvstore.errors import GeometryError
from kvstore.flops import ModelShape
from kvstore.geometry import KvGeometry
from kvstore.messages import ModelFiles
from replica_agent.errors import ModelFilesUnavailable

MAX_BYTES = 64 * 1024 * 1024
"""Largest answer handed out; the largest tokenizer.json in common use has about 35 MB."""


def load_model_files(directory: Path, model: str) -> ModelFiles:
    """Reads `tokenizer.json`, the chat template and the special tokens. Blocking. Raises ModelFilesUnavailable."""
    tokenizer = _read(directory / "tokenizer.json")
    if tokenizer is None:
        raise ModelFilesUnavailable("no_tokenizer", f"{directory} has no tokenizer.json")
    config = _read_object(directory / "tokenizer_config.json")
    template = _read(directory / "chat_template.jinja")
    files = ModelFiles(
        model=model,
        tokenizer_json=tokenizer,
        chat_template=_decode(template, "chat_template.jinja") if template is not None else _template(config),
        special_tokens=_special_tokens(_read_object(directory / "special_tokens_map.json"), config),
        add_bos_token=_flag(config.get("add_bos_token")),
        digest="",
    )
    encoded = msgspec.msgpack.encode(files)
    if len(encoded) > MAX_BYTES:
        raise ModelFilesUnavailable("too_large", f"the files of {directory} take {len(encoded)} bytes of {MAX_BYTES}")
    return msgspec.structs.replace(files, digest=hashlib.sha256(encoded).hexdigest())


def load_geometry(directory: Path, dtype: str | None = None) -> KvGeometry | None:
    """KV geometry from the directory's `config.json`; None where it has none, or one that cannot be computed from."""
    try:
        return KvGeometry.from_config(_read_object(directory / "config.json"), dtype)
    except (GeometryError, ModelFilesUnavailable):
        return None


def load_attention(directory: Path) -> float:
    """`Hello.attention` by the directory's `config.json`; 0 where it has none, or one that cannot be computed from."""
    try:
        return min(ModelShape.from_config(_read_object(directory / "config.json")).attention, 1.0)
    except (GeometryError, ModelFilesUnavailable):
        return 0.0


def _read(path: Path) -> bytes | None:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelFilesUnavailable("too_large", f"{path} takes more than {MAX_BYTES} bytes")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFilesUnavailable("unreadable", f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    raw = _read(path)
    if raw is None:
        return {}
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ModelFilesUnavailable("malformed", f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesUnavailable("malformed", f"{path} is not a JSON object")
    return value


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ModelFilesUnavailable("malformed", f"{name} is not UTF-8: {error}") from error


def _template(config: dict[str, Any]) -> str | None:
    """The template in a tokenizer_config: one text, or a list of named ones of which "default" is meant."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """`*_token` entries, given as text or as {"content": text}; later sources win."""
    tokens: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
