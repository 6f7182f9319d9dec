"""An engine's pages as the doctors of agents and gateways look at them, wrong in whatever way a test wants."""

from __future__ import annotations

from typing import Any

from agent_support import EngineStandIn
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route


class Engine(EngineStandIn):
    """Tells of its publishers and its prefix cache as vLLM does, asks for a key if it has one, and completes."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, Any] | None = None
        self.block_size = 16
        self.prefix_caching = True
        self.prompt_tokens = 400
        self.key = ""
        self.details = True
        self.completions = 200
        self.asked: list[dict[str, str]] = []
        self.app.router.routes += [
            Route("/kv_event_sources", self._sources),
            Route("/v1/completions", self._completion, methods=["POST"]),
        ]

    async def _sources(self, request: Request) -> Response:
        return JSONResponse(self.sources) if self.sources is not None else Response(status_code=404)

    async def _metrics(self, request: Request) -> Response:
        ranks = "".join(
            f'vllm:cache_config_info{{block_size="{self.block_size}",enable_prefix_caching="{self.prefix_caching}",'
            f'engine="{rank}",num_gpu_blocks="1234"}} 1.0\n'
            f'vllm:prompt_tokens_total{{engine="{rank}"}} {self.prompt_tokens}.0\n'
            for rank in range(2)
        )
        return PlainTextResponse(f"{ranks}process_start_time_seconds {self.start_time}\n", self.status)

    async def _completion(self, request: Request) -> Response:
        self.asked.append(dict(request.headers))
        details = {"cached_tokens": 0} if self.details else None
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": details}
        return JSONResponse({"choices": [{"text": "x"}], "usage": usage}, self.completions)

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await super()._models(request)
