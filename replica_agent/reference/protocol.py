"""What clients may send: OpenAI's request bodies with vLLM's additions, checked before anything else happens."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvstore.hint import Hint
from replica_agent.reference.errors import ContextLengthError, RequestError
from replica_agent.reference.sequence import SamplingParams

_T = TypeVar("_T", bound=msgspec.Struct)
_Positive = Annotated[int, Meta(ge=1)]
_Zero = Annotated[float, Meta(ge=0, le=0)]
_MAX_CHOICES = 128
_MAX_STOPS = 16


class StreamOptions(msgspec.Struct):
    """`include_usage`: whether a stream ends with a chunk that carries the usage."""

    include_usage: bool | None = None


class KvTransferParams(msgspec.Struct):
    """Where a prefix can be fetched from, as a gateway says; what other systems put here is ignored."""

    prefix_gateway: Hint | None = None


class _Generate(msgspec.Struct, kw_only=True):
    """Fields of both generation endpoints. A null is the same as an absent field."""

    model: str | None = None
    max_tokens: _Positive | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_CHOICES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    kv_transfer_params: KvTransferParams | None = None
    logprobs: Any = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    presence_penalty: _Zero | None = None
    frequency_penalty: _Zero | None = None

    def limit(self) -> int | None:
        """Tokens to generate at most, as asked for."""
        return self.max_tokens

    def default_limit(self, room: int) -> int:
        """Tokens to generate at most when not asked for, given the room that the prompt leaves."""
        return room

    def check(self) -> None:
        """Refuse what this engine cannot do: silently ignoring it would give a wrong answer."""
        if self.logprobs not in (None, False):
            raise RequestError("logprobs are not supported", "logprobs")
        if self.logit_bias:
            raise RequestError("logit_bias is not supported", "logit_bias")
        if self.response_format and self.response_format.get("type") != "text":
            raise RequestError("only the response format `text` is supported", "response_format")
        stops = self.stops()
        if len(stops) > _MAX_STOPS:
            raise RequestError(f"at most {_MAX_STOPS} stop strings are supported", "stop")
        if "" in stops:
            raise RequestError("a stop string must not be empty", "stop")

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def params(self, prompt_tokens: int, context: int, choice: int) -> SamplingParams:
        """Parameters of one choice. Raises ContextLengthError when prompt and limit do not fit `context` tokens."""
        room = context - prompt_tokens
        asked = self.limit()
        if room < 1 or (asked is not None and asked > room):
            raise ContextLengthError(context, prompt_tokens, asked or 1, "max_tokens" if room >= 1 else None)
        return SamplingParams(
            max_tokens=asked or min(room, self.default_limit(room)),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed + choice,
            stop=self.stops(),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(_Generate, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: _Positive | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_completion_tokens or self.max_tokens

    def check(self) -> None:
        """See the base."""
        super().check()
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError("a forced tool choice is not supported", "tool_choice")


class CompletionRequest(_Generate, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None

    def default_limit(self, room: int) -> int:
        """OpenAI's default for this endpoint."""
        return 16

    def check(self) -> None:
        """See the base."""
        super().check()
        if self.echo:
            raise RequestError("echo is not supported", "echo")
        if self.suffix:
            raise RequestError("suffix is not supported", "suffix")

    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt. Raises RequestError for an empty one."""
        if isinstance(self.prompt, str):
            many: list[str | list[int]] = [self.prompt]
        else:
            ids = [item for item in self.prompt if isinstance(item, int)]
            many = [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]
            if ids and len(ids) < len(self.prompt):
                raise RequestError("token ids and whole prompts cannot be mixed", "prompt")
        if not many or any(len(one) == 0 for one in many):
            raise RequestError("the prompt must not be empty", "prompt")
        return many


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: either a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0)]]


def parse(kind: type[_T], body: bytes) -> _T:
    """Decode a JSON body. Raises RequestError naming the field at fault."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = re.search(r"at `\$\.?([^`]*)`", text) or re.search(r"field `([^`]*)`", text)
        raise RequestError(text, place.group(1) if place else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error
