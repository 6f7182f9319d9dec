"""What identifying a prompt costs: through the worker, and by text on the event loop.

    python benchmarks/identity.py [--model smollm2|tiny|DIR] [--out benchmarks/results/identity.jsonl]

Milliseconds by the clock, as a request waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from stamp import stamp

from gateway.identity import text
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import PromptRequest
from kvstore.identity import Namespace
from kvstore.messages import ModelFiles
from replica_agent.reference.prepare import prepare

SENTENCE = "The committee met on Tuesday, {n} members present, and approved the budget of {m} francs. "


def prose(tokens: int, salt: int = 0) -> str:
    """About so many tokens of text without long repetitions."""
    return "".join(SENTENCE.format(n=n * 7 + salt, m=n * n + salt) for n in range(tokens // 24))


def chat(*contents: str) -> PromptRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return PromptRequest(model="m", namespace=Namespace("m"), messages=json.dumps(messages).encode())


Told = dict[str, Any]


async def timed(name: str, repeat: int, call: Callable[[int], Awaitable[Any]]) -> Told:
    """One line, printed and returned."""
    took = []
    result: Any = None
    for turn in range(repeat):
        began = time.perf_counter()
        result = await call(turn)
        took.append(1e3 * (time.perf_counter() - began))
    took.sort()
    median, p90 = statistics.median(took), took[int(0.9 * (len(took) - 1))]
    tokens, mode = getattr(result, "tokens", 0), str(getattr(result, "mode", ""))
    print(f"{name:48} {tokens:8} tokens  {mode:5} median {median:8.2f} ms  p90 {p90:8.2f}  min {took[0]:8.2f}")
    ms = {"median_ms": round(median, 3), "p90_ms": round(p90, 3), "min_ms": round(took[0], 3)}
    return {"what": name, "tokens": tokens, "mode": mode, "repeat": repeat} | ms


async def measure(model: str) -> list[Told]:
    """Every case, in order."""
    found: list[Told] = []

    async def case(name: str, repeat: int, call: Callable[[int], Awaitable[Any]]) -> None:
        found.append(await timed(name, repeat, call))

    directory = prepare(model)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    files = ModelFiles(
        model="m",
        tokenizer_json=(directory / "tokenizer.json").read_bytes(),
        chat_template=(directory / "chat_template.jinja").read_text(),
        special_tokens={name: value for name, value in config.items() if name.endswith("_token") and value},
        digest=model,
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {model}")
    identifier = Identifier(0, deadline_s=60.0)
    began = time.perf_counter()
    await identifier.start()
    print(f"worker started in {1e3 * (time.perf_counter() - began):.0f} ms", end=", ")
    began = time.perf_counter()
    await identifier.load(files)
    print(f"model loaded in {1e3 * (time.perf_counter() - began):.0f} ms")
    try:
        document = prose(100_000)
        cold = [chat(prose(1_000, salt)) for salt in range(1000, 1040)]
        await case("1k-token chat, cold", 40, lambda turn: identifier.identify(cold[turn]))
        await case("1k-token chat, warm", 100, lambda turn: identifier.identify(cold[0]))
        await case("1k tokens remembered + a new question", 40, lambda turn: identifier.identify(
            chat(prose(1_000, 1000), "Noted.", f"And what about {turn} francs?")))  # fmt: skip
        await case("100k-token chat, cold", 1, lambda turn: identifier.identify(chat(document)))
        later = [chat(document, "Noted.", f"What was approved on day {turn}?") for turn in range(20)]
        await case("100k-token document, next turn", 20, lambda turn: identifier.identify(later[turn]))
        big = [chat(prose(1_000_000, salt)) for salt in (1, 2)]
        print(f"body of {len(big[0].messages or b'') / 1e6:.1f} MB:")
        await case("1M-token chat, cold", 1, lambda turn: identifier.identify(big[0]))
        await case("1M-token chat, warm", 5, lambda turn: identifier.identify(big[0]))
        ids = json.dumps(await identifier.token_ids(chat(prose(12_000)))).encode()
        request = PromptRequest(model="m", namespace=Namespace("m"), prompt=ids)
        await case(f"token ids, {len(ids) // 1024} KiB of JSON", 50, lambda turn: identifier.identify(request))

        async def by_text(request: PromptRequest) -> Any:
            return text.identify(request, 0)

        for name, each in (("1k", cold[0]), ("100k", later[0]), ("1M", big[0])):
            await case(f"text mode, {name}-token chat (on the event loop)", 20, lambda turn, each=each: by_text(each))  # type: ignore[misc]
        print(identifier.stats)
    finally:
        await identifier.close()
    return found


def main() -> None:
    """Prints one line per case, and adds them to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where = {"model": options.model} | stamp() | {"python": platform.python_version()}
    found = asyncio.run(measure(options.model))
    if options.out:
        with options.out.open("a") as file:
            file.writelines(json.dumps(told | where) + "\n" for told in found)


if __name__ == "__main__":
    main()
