"""Where a request would go and why, without sending it."""

from __future__ import annotations

from typing import Any

from gateway.errors import NoReplica, RequestError
from gateway.fleet.fleet import Fleet
from gateway.path.admit import CHAT, COMPLETIONS, prompt_request
from gateway.path.body import Body
from gateway.path.identify import Identify
from gateway.placement.placer import Placer


class Explain:
    """Runs admit's parsing, identify and place on a body; counts nothing and changes nothing."""

    def __init__(self, identify: Identify, placer: Placer, fleet: Fleet) -> None:
        self._identify = identify
        self._placer = placer
        self._fleet = fleet

    async def __call__(self, raw: bytes) -> dict[str, Any]:
        """The body of a chat or completions request -> every replica's terms. Raises RequestError."""
        body = Body(raw)
        model = body.string("model")
        if not model or not self._fleet.knows(model):
            raise RequestError(404, f"model {model!r} does not exist", param="model", code="model_not_found")
        prompt = prompt_request(CHAT if body.get("messages") is not None else COMPLETIONS, model, body)
        assert prompt is not None
        identity = await self._identify.of(prompt)
        try:
            placement = self._placer.place(identity, self._fleet.views(model, identity.mode))
        except NoReplica as error:
            raise RequestError(503, f"no replica of {model!r} is up", type="server_error", code="no_replica") from error
        return {
            "identity": identity.mode,
            "identity_fallback": identity.fallback,
            "prompt_tokens": identity.tokens,
            "units": len(identity.keys),
            "placement": placement,
        }
