"""A model's template and tokenizer together: requests to token ids."""

from __future__ import annotations

import json

from gateway.errors import IdentityUnavailable
from gateway.identity import chat
from gateway.identity.chat import Dialect
from gateway.identity.prompt import PromptRequest
from gateway.identity.template import ChatTemplate
from gateway.identity.tokens import SegmentCache, SegmentTokenizer
from kvstore.errors import IdentityError
from kvstore.identity import pack_tokens
from kvstore.messages import ModelFiles


class PromptModel:
    """What a replica's model files make of a request. Owns the tokenizer; the segment cache is shared.

    Raises IdentityUnavailable("bad_tokenizer" or "bad_template") when the files cannot be used.
    """

    def __init__(self, files: ModelFiles, cache: SegmentCache) -> None:
        self.template = (
            ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template is not None else None
        )
        self.tokenizer = SegmentTokenizer(
            files.tokenizer_json, cache, add_bos=files.add_bos_token, bos=files.special_tokens.get("bos_token")
        )

    def tokens(self, request: PromptRequest, dialect: Dialect) -> bytes:
        """Packed token ids of a request's prompt. Raises IdentityUnavailable; may hang where the template does."""
        if request.messages is not None:
            return self._chat(request, request.messages, dialect)
        if request.prompt is None:
            raise IdentityUnavailable("bad_request", "neither messages nor prompt")
        prompt = first_prompt(request.prompt)
        if isinstance(prompt, bytes):
            return prompt
        if request.add_special_tokens is False:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_prompt(prompt)

    def _chat(self, request: PromptRequest, messages: bytes, dialect: Dialect) -> bytes:
        if self.template is None:
            raise IdentityUnavailable("no_template", "the model has no chat template")
        if request.continue_final_message and request.add_generation_prompt:
            raise IdentityUnavailable("bad_request", "cannot both continue a message and begin one")
        variables = chat.variables(request, dialect)
        seen = chat.conversation(messages, dialect, self.template.lists, self.template.developer)
        text = self.template.render(seen, variables, request.continue_final_message)
        # Templates write their special tokens themselves.
        return self.tokenizer.encode_prompt(text) if request.add_special_tokens else self.tokenizer.encode(text)


def first_prompt(raw: bytes) -> str | bytes:
    """The first prompt of a completion request: text, or packed token ids. Raises IdentityUnavailable."""
    try:
        prompt = json.loads(raw)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and not any(isinstance(token, bool) for token in prompt):
            return pack_tokens(prompt)
    except (ValueError, RecursionError, IdentityError) as error:
        raise IdentityUnavailable("bad_request", str(error)[:500]) from error
    raise IdentityUnavailable("bad_request", "prompt is neither text nor token ids")
