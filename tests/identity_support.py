"""Real models for the identity tests, and transformers as the independent judge of their token ids."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gateway.identity.identifier import Identifier
from gateway.identity.process import WorkerProcess
from gateway.identity.prompt import IdentityMode, PromptIdentity, PromptRequest
from gateway.identity.protocol import Load, Reply, Request
from kvstore.identity import Namespace
from kvstore.messages import ModelFiles
from replica_agent.reference.prepare import prepare

FIXTURES = Path(__file__).parent / "fixtures"
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
SEED = 7

CHATML_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions you may call:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role in ['user', 'system'] %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson(indent=2) ~ '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<result>' ~ message.content ~ '</result><|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- 'No thinking.\\n' }}{%- endif %}
{%- endif %}
"""
HEADERS_AND_DATE = """\
{{- bos_token }}
{%- if not date is defined %}{%- set date = strftime_now('%Y') %}{%- endif %}
{%- for message in messages %}
  {%- if loop.first %}{{- 'Year: ' + date + '\\n' }}{%- endif %}
  {{- '<|im_start|>' + message['role'] + '<|im_end|>\\n\\n' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant<|im_end|>

{% endif %}
"""
PARTS = """\
{% for message in messages %}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}
{{ message['content'] }}
{% else %}
{% for part in message['content'] %}{{ loop.index }}) {{ part['text'] }}{% if not loop.last %} & {% endif %}{% endfor %}

{% endif %}
<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
ENDLESS = (
    "{% for message in messages %}{% if 'spin' in message.content %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ message.content }}<|im_end|>{% endfor %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "A forecast, <b>now</b> & 'here' – für Zürich",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def model_files(name: str, *, template: str | None = None, served: str | None = None) -> ModelFiles:
    """The files of `smollm2` or `tiny`, with another template if one is given."""
    directory = prepare(name)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    own = template if template is not None else (directory / "chat_template.jinja").read_text()
    return ModelFiles(
        model=served or name,
        tokenizer_json=(directory / "tokenizer.json").read_bytes(),
        chat_template=own,
        special_tokens={key: value for key, value in config.items() if key.endswith("_token") and value is not None},
        digest=f"{name} {hash(own)}",
    )


def judge(name: str) -> Any:
    """transformers' tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(prepare(name), local_files_only=True)


def judged(tokenizer: Any, messages: list[dict[str, Any]], template: str | None = None, **variables: Any) -> list[int]:
    """Token ids by transformers, of messages as an engine would hand them over: no nulls, arguments parsed."""
    seen = []
    for message in messages:
        message = {**message, "content": "" if message.get("content") is None else message["content"]}
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        seen.append(message)
    variables.setdefault("add_generation_prompt", True)
    ids = tokenizer.apply_chat_template(seen, chat_template=template, tokenize=True, return_dict=False, **variables)
    return list(ids)


def chat(messages: Any, *, model: str = "smollm2", lora: str = "", salt: str = "", **fields: Any) -> PromptRequest:
    """A chat request; fields that are JSON in a body may be given as Python values."""
    raw: dict[str, Any] = {
        name: json.dumps(value).encode() if name in ("tools", "chat_template_kwargs", "documents") else value
        for name, value in fields.items()
    }
    return PromptRequest(
        model=model, namespace=Namespace(model, lora, salt), messages=json.dumps(messages).encode(), **raw
    )


def completion(prompt: Any, *, model: str = "smollm2", **fields: Any) -> PromptRequest:
    """A completion request."""
    return PromptRequest(model=model, namespace=Namespace(model), prompt=json.dumps(prompt).encode(), **fields)


def conversations(name: str) -> list[list[dict[str, Any]]]:
    """The conversations of a fixture, or of a whole trace by its file name."""
    path = FIXTURES / name
    text = path.read_text() if path.exists() else gzip.decompress((TRACES / name).read_bytes()).decode()
    return [json.loads(line)["messages"] for line in text.splitlines()]


def turns(conversation: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Every message list that was sent for an answer."""
    for end, message in enumerate(conversation, 1):
        if message["role"] in ("user", "tool"):
            yield conversation[:end]


async def exact(identifier: Identifier, request: PromptRequest, seconds: float = 30.0) -> PromptIdentity:
    """The exact identity of a request, asked for until a worker is up to give it."""
    async with asyncio.timeout(seconds):
        while True:
            identity = await identifier.identify(request)
            if identity.mode is IdentityMode.EXACT:
                return identity
            assert identity.fallback in ("restarting", "deadline", "worker_died"), identity.fallback
            await asyncio.sleep(0.02)


@asynccontextmanager
async def identifying(*files: ModelFiles, **options: Any) -> AsyncIterator[Identifier]:
    """A running identifier with models loaded."""
    identifier = Identifier(SEED, **{"deadline_s": 60.0, **options})
    await identifier.start()
    try:
        for each in files:
            await identifier.load(each)
        yield identifier
    finally:
        await identifier.close()


async def lose_while_loading(identifier: Identifier, model: str) -> None:
    """Kills the worker, and the next one while it loads the model, as when the host is short of memory for a moment;
    returns when a third one is up."""
    honest, starts = WorkerProcess.call, identifier.stats.worker_starts
    (pid,) = identifier.worker_pids

    async def call(process: WorkerProcess, request: Request) -> Reply:
        if isinstance(request, Load) and request.files.model == model:
            os.kill(process.pid, signal.SIGKILL)
        return await honest(process, request)

    with patch.object(WorkerProcess, "call", call):
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while identifier.stats.worker_starts < starts + 2:
                await asyncio.sleep(0.005)
