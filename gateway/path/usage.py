"""What an engine says a request cost."""

from __future__ import annotations

import msgspec

from kvstore.bounds import Count


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: Count | None = None


class Usage(msgspec.Struct, frozen=True):
    """The `usage` object of an OpenAI reply; unknown fields are ignored."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens the engine took from its cache, None where it does not tell."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Reply(msgspec.Struct, frozen=True):
    """The parts of a reply, or of one event of a stream, that the gateway reads."""

    usage: Usage | None = None
    choices: list[msgspec.Raw] | None = None


_decode = msgspec.json.Decoder(Reply).decode


def read_reply(data: bytes | bytearray) -> Reply | None:
    """A reply object, None when the bytes are not one: an engine may answer anything, and it is passed on as it is."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
