"""A fake engine behind real HTTP, in the shape of vLLM 0.32's routes: the adapter of real servers is tested against it.

Bodies, statuses and their quirks follow vLLM's source: control routes exist in dev mode only, some answer
``{"error": "..."}`` where others wrap the message; ``--api-key`` guards ``/v1`` and ``/inference`` and nothing else; a
client that goes away aborts its generation, but not a control call. A call whose outcome the engine's script makes
unknown has its connection cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from rc.effects.fake import FakeEngine
from rc.effects.protocol import Failed, GenerateRequest, Generation, Ok, Outcome, Refused, Unknown

__all__ = ("FakeServer", "SeenRequest")

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MODEL: Final = "policy"
"""Name under which the model is served."""

_BOOT_EPOCH_S: Final = 1_700_000_000.25
"""Start time of the engine's process number 0; each restart is a second later."""

_SCALE_OUT_OFF = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class SeenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it arrived; names of headers are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body."""
        return msgspec.json.decode(self.body)


class FakeServer:
    """Serves a `FakeEngine` at `url` while `run` is entered.

    Args:
        engine: What answers; it may be used directly at the same time.
        dev_mode: Whether the control routes exist (``VLLM_SERVER_DEV_MODE=1``).
        scale_out: Whether the generate route is on (``--enable-scale-out``).
        prompt_tokens_details: Whether cached tokens are told (``--enable-prompt-tokens-details``).
        api_key: What the guarded routes ask for (``--api-key``).
        answers: Handlers by path, in place of the usual ones.
    """

    def __init__(
        self,
        engine: FakeEngine,
        *,
        dev_mode: bool = True,
        scale_out: bool = True,
        prompt_tokens_details: bool = True,
        api_key: str | None = None,
        answers: Mapping[str, Handler] | None = None,
    ) -> None:
        self.engine = engine
        self.answers = dict(answers or {})
        self.seen: list[SeenRequest] = []
        self.left_early: list[str] = []
        """Paths of requests whose client went away before the answer."""
        self.url = ""
        self._scale_out = scale_out
        self._prompt_tokens_details = prompt_tokens_details
        self._api_key = api_key
        self._routes = {**self._always(), **(self._control() if dev_mode else {})}
        self._calls: set[asyncio.Future[Any]] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    # ------------------------------------------------------------------ running

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        """Listen on a free port of the loopback address and give the URL."""
        await self.listen()
        try:
            yield self.url
        finally:
            await self.stop()

    async def listen(self) -> None:
        """Listen; after `stop`, again at the same address, as a restarted server does."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        # A client that goes away cancels its handler, which is how vLLM aborts a generation.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Stop listening and cut what is open: from here on nothing is there."""
        for call in tuple(self._calls):
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        seen = SeenRequest(
            method=request.method,
            path=request.path,
            query=dict(request.query),
            headers={name.lower(): value for name, value in request.headers.items()},
            body=await request.read(),
        )
        self.seen.append(seen)
        try:
            return await self._answer(request, seen)
        except asyncio.CancelledError:
            self.left_early.append(request.path)
            raise

    async def _answer(self, request: web.Request, seen: SeenRequest) -> web.StreamResponse:
        if not self.engine.alive:
            return _cut(request)
        if seen.path in self.answers:
            return await self.answers[seen.path](request)
        if seen.path.startswith(("/v1", "/inference")) and not self._authorized(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        methods = self._routes.get(seen.path)
        if methods is None:
            return _error(404, "Not Found", "Not Found")
        route = methods.get(seen.method)
        if route is None:
            return _error(405, "Method Not Allowed", "Method Not Allowed")
        try:
            return await route(seen)
        except msgspec.MsgspecError as error:
            return _error(400, f"1 validation error:\n  {error}", "Bad Request")
        except _CutConnectionError:
            return _cut(request)

    def _authorized(self, request: web.Request) -> bool:
        return self._api_key is None or request.headers.get("Authorization") == f"Bearer {self._api_key}"

    # ------------------------------------------------------------------ routes

    def _always(self) -> dict[str, dict[str, Route]]:
        return {
            "/health": {"GET": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/v1/models": {"GET": self._models},
            "/inference/v1/generate": {"POST": self._generate},
        }

    def _control(self) -> dict[str, dict[str, Route]]:
        engine = self.engine
        return {
            "/is_paused": {"GET": self._is_paused},
            "/weight_info": {"GET": self._weight_info},
            "/get_world_size": {"GET": self._world_size},
            "/pause": {"POST": lambda seen: self._control_call(engine.pause(), {"status": "paused"}, plain=True)},
            "/resume": {"POST": lambda seen: self._control_call(engine.resume(), {"status": "resumed"}, plain=True)},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/reset_mm_cache": {"POST": lambda seen: self._control_call(engine.reset_multimodal_cache(), None)},
            "/reset_encoder_cache": {"POST": lambda seen: self._control_call(engine.reset_encoder_cache(), None)},
            "/update_weight_version": {"POST": self._update_weight_version},
            "/init_weight_transfer_engine": {"POST": self._init_transfer},
            "/shutdown_weight_transfer_engine": {
                "POST": lambda seen: self._control_call(
                    engine.shutdown_weight_transfer_engine(), {"message": "Weight transfer shut down"}
                )
            },
            "/start_weight_update": {
                "POST": lambda seen: self._control_call(
                    engine.start_weight_update(), {"message": "Weight update started"}
                )
            },
            "/update_weights": {"POST": self._update_weights},
            "/finish_weight_update": {"POST": self._finish_weight_update},
        }

    async def _control_call(
        self, call: Coroutine[Any, Any, Outcome[T]], answer: object, *, plain: bool = False
    ) -> web.Response:
        """Answer what the engine says; the call goes on if the client does not wait for it."""
        outcome = await self._outlive_client(call)
        match outcome:
            case Ok():
                return web.Response() if answer is None else web.json_response(answer)
            case Refused(message, status):
                code = status or 400
                return web.json_response({"error": message}, status=code) if plain else _error(code, message)
            case Failed(message, status):
                code = status or 500
                return web.json_response({"error": message}, status=code) if plain else _error(code, message)
            case Unknown():
                raise _CutConnectionError

    async def _outlive_client(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.ensure_future(call)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await asyncio.shield(future)

    async def _health(self, _: SeenRequest) -> web.Response:
        return web.Response()

    async def _version(self, _: SeenRequest) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: SeenRequest) -> web.Response:
        card = {
            "id": MODEL,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.engine.model_root,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, _: SeenRequest) -> web.Response:
        text = (
            "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
            "# TYPE process_start_time_seconds gauge\n"
            f"process_start_time_seconds {_BOOT_EPOCH_S + self.engine.boot}\n"
            '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0.0\n'
        )
        return web.Response(text=text, content_type="text/plain")

    async def _is_paused(self, _: SeenRequest) -> web.Response:
        look = await self._look()
        return await self._control_call(_same(look), {"is_paused": self.engine.paused}, plain=True)

    async def _weight_info(self, _: SeenRequest) -> web.Response:
        look = await self._look()
        return await self._control_call(_same(look), {"weight_version": self.engine.label})

    async def _look(self) -> Outcome[None]:
        # A faulty look is scripted as the in-memory engine's `observe` is, for each of the routes that it takes.
        observed = await self.engine.observe()
        return Ok(None) if observed.problem is None else Failed(observed.problem, 500)

    async def _world_size(self, _: SeenRequest) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _reset_prefix_cache(self, _: SeenRequest) -> web.Response:
        outcome = await self._outlive_client(self.engine.reset_prefix_cache())
        return await self._control_call(
            _same(outcome), {"success": outcome.value if isinstance(outcome, Ok) else False}
        )

    async def _update_weight_version(self, seen: SeenRequest) -> web.Response:
        label = msgspec.json.decode(seen.body, type=_NewVersion).new_version
        return await self._control_call(self.engine.set_label(label), {"success": True, "new_version": label})

    async def _init_transfer(self, seen: SeenRequest) -> web.Response:
        info = msgspec.json.decode(seen.body, type=_InitInfo).init_info
        call = self.engine.init_weight_transfer_engine(info)
        return await self._control_call(call, {"message": "Weight transfer initialized"})

    async def _update_weights(self, seen: SeenRequest) -> web.Response:
        info = msgspec.json.decode(seen.body, type=_UpdateInfo).update_info
        call = self.engine.update_weights(str(info.get("content", "")))
        return await self._control_call(call, {"message": "Weights updated"})

    async def _finish_weight_update(self, seen: SeenRequest) -> web.Response:
        label = msgspec.json.decode(seen.body or b"{}", type=_WeightVersion).weight_version
        call = self.engine.finish_weight_update(self.engine.label if label is None else label)
        return await self._control_call(call, {"message": "Weight update finished"})

    async def _generate(self, seen: SeenRequest) -> web.Response:
        if not self._scale_out:
            return _error(403, _SCALE_OUT_OFF, "PermissionDeniedError")
        body = msgspec.json.decode(seen.body, type=_Generate)
        if body.model not in (None, MODEL):
            return _error(404, f"The model `{body.model}` does not exist.", "NotFoundError")
        if not body.token_ids or len(body.token_ids) >= self.engine.max_model_len:
            return _error(400, f"The prompt has {len(body.token_ids)} tokens", "BadRequestError")
        request_id = seen.headers.get("x-request-id", "0")
        request = GenerateRequest(
            request=request_id,
            prompt_token_ids=tuple(body.token_ids),
            sampling={"max_tokens": 16, **body.sampling_params},
            cache_salt=body.cache_salt or "",
        )
        outcome = await self.engine.generate(request)
        if not isinstance(outcome, Ok):
            return await self._control_call(_same(outcome), None)
        return web.json_response(self._completion(request_id, body, outcome.value))

    def _completion(self, request_id: str, body: _Generate, generation: Generation) -> dict[str, Any]:
        logprobs = {
            "content": [
                {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                for token, logprob in zip(generation.token_ids, generation.logprobs, strict=True)
            ]
        }
        prompt, sampled = len(body.token_ids), len(generation.token_ids)
        details = {"cached_tokens": generation.cached_tokens} if self._prompt_tokens_details else None
        return {
            "request_id": f"generate-tokens-{request_id}",
            "model": MODEL,
            "created": int(time.time()),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": sampled,
                "total_tokens": prompt + sampled,
                "prompt_tokens_details": details,
            },
            "prompt_logprobs": None,
            "output_mode": "tokens",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": generation.finish_reason,
                    "stop_reason": None,
                    "token_ids": list(generation.token_ids),
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [
                        {"version": span.label, "start": span.start, "end": span.end} for span in generation.spans
                    ],
                    "logprobs": None if body.sampling_params.get("logprobs") is None else logprobs,
                }
            ],
        }


Route = Callable[[SeenRequest], Awaitable[web.Response]]


class _NewVersion(msgspec.Struct):
    new_version: str


class _WeightVersion(msgspec.Struct):
    weight_version: str | None = None


class _InitInfo(msgspec.Struct):
    init_info: dict[str, Any]


class _UpdateInfo(msgspec.Struct):
    update_info: dict[str, Any]


class _Generate(msgspec.Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    cache_salt: str | None = None


class _CutConnectionError(Exception):
    """The engine's answer is lost."""


async def _same(outcome: Outcome[T]) -> Outcome[T]:
    return outcome


def _cut(request: web.Request) -> web.Response:
    """Reset the connection under the request."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _error(status: int, message: str, kind: str = "InternalServerError") -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)
