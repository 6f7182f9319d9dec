"""What the flags of a plan mean. Everything wrong is a SettingsError that begins with the flag."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gateway.errors import SettingsError
from kvstore.errors import GeometryError
from kvstore.flops import ModelShape
from kvstore.geometry import DTYPE_BYTES, KvGeometry
from kvstore.models import KNOWN_MODELS

_MOST = 1 << 40
_MOST_BYTES = 64 * 1024 * 1024


class Model(NamedTuple):
    """A model to plan for: its name, what its KV is like, and what computing it takes."""

    name: str
    geometry: KvGeometry
    shape: ModelShape


def read_model(name: str, dtype: str | None = None) -> Model:
    """A model known by name, or described by a `config.json` (or a directory with one)."""
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise SettingsError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    config = KNOWN_MODELS.get(name.lower()) or _read_config(Path(name))
    try:
        return Model(name, KvGeometry.from_config(config, dtype), ModelShape.from_config(config))
    except GeometryError as error:
        raise SettingsError(f"--model {name}: {error}") from error


def number(flag: str, text: str, *, least: float = 0.0, most: float = 1e30) -> float:
    """A number above `least` and at most `most`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least < value <= most:
        raise SettingsError(f"{flag}: expected a number above {least:g} and at most {most:g}, got {text!r}")
    return value


def amount(flag: str, text: str, *, below: float = math.inf) -> float:
    """A number from 0 on, and below `below`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < below:
        limit = "" if below == math.inf else f" and below {below:g}"
        raise SettingsError(f"{flag}: expected a number of 0 or more{limit}, got {text!r}")
    return value


def counts(flag: str, text: str) -> list[int]:
    """Whole numbers above 0, separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value <= _MOST for value in values):
        raise SettingsError(f"{flag}: expected whole numbers from 1 on, such as 1,2,4, got {text!r}")
    return values


def write_plot(path: Path, svg: str) -> None:
    """The drawing, as a file."""
    try:
        path.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--plot: {error}") from error


def _read_config(path: Path) -> Mapping[str, Any]:
    known = ", ".join(KNOWN_MODELS)
    try:
        path = path / "config.json" if path.is_dir() else path
        if path.stat().st_size > _MOST_BYTES:
            raise SettingsError(f"--model: {path} takes more than {_MOST_BYTES} bytes")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SettingsError(f"--model: {path} is neither a file nor one of {known}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--model: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise SettingsError(f"--model: {path} is not a JSON object")
    return config
