"""The documents the demo asks about, and what it asks.

Six texts of about 1,500 SmolLM2 tokens each: long enough that prefilling one is felt on a laptop, short enough that
several fit into a small KV pool. The questions are short (at most 25 tokens), so that a follow-up is almost entirely
prefix. Each can be answered from its document, but nothing here depends on the answer being right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Document:
    """One document: `name` is the stem of its file under `documents/`, `questions` are asked in this order."""

    name: str
    title: str
    questions: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole document, ASCII Markdown; read once per process."""
        return _read(self.name)


@cache
def _read(name: str) -> str:
    return files("gateway.demo").joinpath("documents", f"{name}.md").read_text(encoding="ascii")


DOCUMENTS: tuple[Document, ...] = (
    Document(
        name="tram-timetable",
        title="Corvane Tramways: Winter Timetable Notice",
        questions=(
            "When does the last red car leave Harbour Steps on working days?",
            "Which bus replaces the green line during the works at Tannery Bridge?",
            "What happens to the red line at level B?",
            "How much is a day ticket, and until when is it valid?",
            "Where and for how long is lost property kept?",
        ),
    ),
    Document(
        name="seed-bank-handbook",
        title="Handbook of the Ardlinn Seed Bank",
        questions=(
            "At what temperature and humidity is the drying room kept?",
            "Which species must never be dried?",
            "What are the four packets made from every lot?",
            "Why does a packet from vault 1 stay closed for one night?",
            "When is a lot due for regeneration?",
        ),
    ),
    Document(
        name="lighthouse-log",
        title="Log of the Skarne Point Light",
        questions=(
            "Why was the lens wound by hand on the night of 11 October?",
            "How many men were rescued from the Marigold Ellis?",
            "What was wrong with the number 2 compressor?",
            "How long did the fog signal run on 6 October?",
            "What did the inspector blame?",
        ),
    ),
    Document(
        name="bakery-allergens",
        title="Pellam & Daughters Bakery: Allergen Policy",
        questions=(
            "Who may change a recipe sheet?",
            "In which order are the doughs mixed during the day?",
            "What must be done if the label on a product is wrong?",
            "Why was the lemon slice off sale last September?",
            "What does a worker say instead of nut free?",
        ),
    ),
    Document(
        name="museum-loan",
        title="Loan Agreement 2031/17",
        questions=(
            "What is the total insured value of the works?",
            "For how many days may the watercolour be shown?",
            "Which known weaknesses does the lender point out?",
            "What does the borrower owe if it cancels after 15 January?",
            "Who may photograph the works, and how?",
        ),
    ),
    Document(
        name="ferry-safety",
        title="River Ferry Nettle: Safety Manual",
        questions=(
            "How many cars and persons may the ferry carry?",
            "When does the ferry not sail because of wind?",
            "What does the master do when somebody falls overboard?",
            "How is a burning electric car treated?",
            "Which drill is held on the second Monday of the month?",
        ),
    ),
)
"""Every document of the demo. The order is fixed: the demo's prompts, and so its routing, are repeatable."""
