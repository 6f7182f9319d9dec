"""Second step: name the prompt's prefixes, exactly where the fleet's reports can be compared with them."""

from __future__ import annotations

from gateway.fleet.fleet import Fleet
from gateway.identity.identifier import Identifier
from gateway.identity.prompt import IdentityMode, PromptIdentity, PromptRequest
from gateway.identity.status import ModelMode
from gateway.path.exchange import Exchange

MAX_TOKEN_BYTES = 64
"""JSON bytes that a token of an honest prompt takes at most. A prompt that cannot fit into the model's context will be
refused by the engine; tokenizing it would only make others wait."""


class Identify:
    """Fills in `identity`; leaves it None for requests without a prompt."""

    def __init__(self, identifier: Identifier, fleet: Fleet) -> None:
        self._identifier = identifier
        self._fleet = fleet

    async def identify(self, exchange: Exchange) -> None:
        """Never fails: what cannot be identified exactly is identified by its text, and the receipt says so."""
        if exchange.prompt is not None:
            exchange.identity = await self.of(exchange.prompt)

    def modes(self) -> dict[str, ModelMode]:
        """How the prompts of every model that is served or loaded are identified now, and why not exactly."""
        found = {model: self._assumed(model) for model in self._fleet.models()}
        return found | self._identifier.modes()

    def _assumed(self, model: str) -> ModelMode:
        """Of a model whose files are not loaded."""
        agents = self._fleet.has_agents(model)
        return ModelMode(
            mode=IdentityMode.TEXT if agents else IdentityMode.HASH,
            why="no_tokenizer" if agents else "no_agent",
            off=frozenset(),
            dialect=None,
            segmented=False,
        )

    async def of(self, prompt: PromptRequest) -> PromptIdentity:
        """The identity of one prompt."""
        if self._fleet.has_agents(prompt.model):
            if len(prompt.messages or prompt.prompt or b"") > self._fleet.context(prompt.model) * MAX_TOKEN_BYTES:
                return self._identifier.identify_text(prompt, IdentityMode.TEXT, "too_long")
            return await self._identifier.identify(prompt)
        return self._identifier.identify_text(prompt, IdentityMode.HASH, "no_agent")
