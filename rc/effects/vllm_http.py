"""The stock vLLM server over HTTP: dev-mode control routes of an unmodified vLLM, and token-in token-out generation.

What rc relies on, by vLLM 0.32: ``/pause``, ``/resume``, ``/is_paused``, ``/reset_*_cache``, ``/weight_info``,
``/update_weight_version`` and the weight-update routes exist in dev mode only; ``/inference/v1/generate`` needs
``--enable-scale-out``; ``/metrics`` carries the start time of the server process, which is how a restart shows.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import anyio
import msgspec

from rc.effects.protocol import (
    EngineFacts,
    Failed,
    GenerateRequest,
    Generation,
    Ok,
    Outcome,
    Refused,
    Unknown,
)
from rc.effects.vllm_answers import error_text, generation_of
from rc.errors import EngineUnreachable
from rc.evidence import Observation

__all__ = ("DEADLINES_S", "VllmHttpEngine")

DEADLINES_S: Final[Mapping[str, float]] = MappingProxyType(
    {
        # Reading state takes milliseconds; while a utility call blocks the engine it takes as long as that call.
        "look": 10.0,
        # Pause, resume, labels and cache resets take milliseconds; pausing also waits for the step that is running.
        "control": 60.0,
        # Weights: bounded by the transfer's own deadline, which is shorter; this one is the last resort.
        "weights": 600.0,
        # One completion; the longest rollouts in the field take minutes.
        "generate": 1800.0,
    }
)

_MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Largest answer that is read: 100,000 tokens with logprobs are about 10 MB."""

_KEEPALIVE_S = 2.0
"""How long an idle connection is used again. vLLM closes one after 5 s; a call sent into that moment would be lost, and
whether it arrived unknown."""

_BOOT_METRIC = b"process_start_time_seconds "

_GAVE_UP = (408, 499)
"""Statuses by which a proxy gives up on a request that it may have passed on: not a refusal."""

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1, and keep its port private: these routes ask for no key"


class VllmHttpEngine:
    """One vLLM server.

    Args:
        url: Its address, e.g. ``http://127.0.0.1:8000``.
        api_key: Sent as a bearer token where given.
        deadlines_s: Overrides of `DEADLINES_S`.
        name: Its name in the journal. Default: the URL.

    Raises:
        EngineUnreachable: If the URL is not one of an HTTP server.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadlines_s: Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> None:
        if not _is_server_url(url):
            raise EngineUnreachable(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._name = name or self.url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._deadlines_s = {**DEADLINES_S, **(deadlines_s or {})}
        self._session: aiohttp.ClientSession | None = None
        self._model = ""

    @property
    def name(self) -> str:
        """The engine's name in the journal."""
        return self._name

    async def aclose(self) -> None:
        """Close connections."""
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()

    # ------------------------------------------------------------------ looking

    async def probe(self) -> EngineFacts:
        """Find out what answers and what it can do.

        Raises:
            EngineUnreachable: Nothing answers, or it is not a vLLM.
        """
        version = await self._json("GET", "/version", "look")
        models = await self._json("GET", "/v1/models", "look")
        match version, models:
            case Ok({"version": str(vllm)}), Ok({"data": [{"id": str(model)} as served, *_]}):
                self._model = model
            case (Refused(status=401), _) | (_, Refused(status=401)):
                wrong = "does not accept this API key" if self._headers else "asks for an API key"
                raise EngineUnreachable(f"{self.url} {wrong}; pass its --api-key as api_key (command line: RC_API_KEY)")
            case (Refused() | Failed() | Unknown() as problem, _):
                raise EngineUnreachable(f"no vLLM answers at {self.url}: {problem.message}")
            case _:
                raise EngineUnreachable(f"what answers at {self.url} is no vLLM server (/version, /v1/models differ)")
        root, max_model_len = served.get("root"), served.get("max_model_len")
        return EngineFacts(
            vllm=vllm,
            model=model,
            model_root=root if isinstance(root, str) else "",
            max_model_len=max_model_len if isinstance(max_model_len, int) else 0,
            profile="stock",
            missing=await self._missing(),
            exposed=await self._exposed(),
        )

    async def _missing(self) -> tuple[str, ...]:
        missing: list[str] = []
        for path in ("/is_paused", "/weight_info"):
            outcome = await self._json("GET", path, "look")
            if not isinstance(outcome, Ok):
                missing.append(f"{path} does not answer ({outcome.message}): {_DEV_MODE}")
        # An empty request is never valid: where the route is on, it is rejected as such.
        generate = await self._json("POST", "/inference/v1/generate", "look", json={})
        if isinstance(generate, Refused) and generate.status in (403, 404):
            missing.append("/inference/v1/generate is off: start the server with --enable-scale-out")
        elif not isinstance(generate, Refused) or generate.status is None:
            missing.append(f"/inference/v1/generate does not check what it is sent ({_words(generate)}): no vLLM 0.32")
        if (await self._boot())[0] is None:
            missing.append("/metrics gives no process_start_time_seconds, so that a restart would go unnoticed")
        return tuple(missing)

    async def _exposed(self) -> tuple[str, ...]:
        exposed: list[str] = []
        async with aiohttp.ClientSession() as stranger:
            outcome = await self._request(stranger, "GET", "/is_paused", self._deadlines_s["look"], None, {})
        if isinstance(outcome, Ok):
            exposed.append("control routes (/pause, /update_weights, ...) answer without a key: keep the port private")
        host = urlsplit(self.url).hostname or ""
        if isinstance(outcome, Ok) and host not in ("127.0.0.1", "localhost", "::1"):
            exposed.append(f"and {host} is not a loopback address, so others may reach them")
        return tuple(exposed)

    async def observe(self) -> Observation:
        """Read label, pause state and boot without changing anything.

        The boot comes last: if it is the expected one, the answers before it came from that process too.
        """
        label = await self._json("GET", "/weight_info", "look")
        paused = await self._json("GET", "/is_paused", "look")
        boot, boot_problem = await self._boot()
        problems = [outcome.message for outcome in (label, paused) if not isinstance(outcome, Ok)]
        if boot_problem is not None:
            problems.append(boot_problem.message)
        return Observation(
            boot=boot,
            label=_field(label, "weight_version", str),
            paused=_field(paused, "is_paused", bool),
            gone=all(isinstance(outcome, _NothingListens) for outcome in (label, paused, boot_problem)),
            problem="; ".join(dict.fromkeys(problems)) or None,
        )

    async def _boot(self) -> tuple[str | None, Refused | Failed | Unknown | None]:
        outcome = await self._bytes("GET", "/metrics", "look")
        if not isinstance(outcome, Ok):
            return None, outcome
        for line in outcome.value.splitlines():
            if line.startswith(_BOOT_METRIC):
                return line.removeprefix(_BOOT_METRIC).decode(errors="replace").strip(), None
        return None, Failed("/metrics has no process_start_time_seconds")

    # ------------------------------------------------------------------ controlling

    async def pause(self) -> Outcome[None]:
        """Pause generation; in-flight requests are aborted, caches are left for the explicit resets."""
        return await self._do("/pause?mode=abort&clear_cache=false", "control")

    async def resume(self) -> Outcome[None]:
        """Generate again."""
        return await self._do("/resume", "control")

    async def reset_prefix_cache(self) -> Outcome[bool]:
        """Reset the prefix cache; vLLM answers 200 also where it did not, so its word is the value."""
        outcome = await self._json("POST", "/reset_prefix_cache", "control")
        if not isinstance(outcome, Ok):
            return outcome
        success = _field(outcome, "success", bool)
        return Failed("/reset_prefix_cache did not say whether it succeeded") if success is None else Ok(success)

    async def reset_multimodal_cache(self) -> Outcome[None]:
        """Reset the multimodal processor caches."""
        return await self._do_silently("/reset_mm_cache", "control")

    async def reset_encoder_cache(self) -> Outcome[None]:
        """Reset the encoder cache."""
        return await self._do_silently("/reset_encoder_cache", "control")

    async def set_label(self, label: str) -> Outcome[None]:
        """Attest this version from now on."""
        return await self._do("/update_weight_version", "control", json={"new_version": label})

    # ------------------------------------------------------------------ weight update routes

    async def world_size(self) -> Outcome[int]:
        """Number of worker ranks that take part in a weight transfer."""
        outcome = await self._json("GET", "/get_world_size", "look")
        if not isinstance(outcome, Ok):
            return outcome
        size = _field(outcome, "world_size", int)
        return Failed("/get_world_size gave no world_size") if size is None else Ok(size)

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Outcome[None]:
        """Have every worker join the transfer group."""
        return await self._do("/init_weight_transfer_engine", "weights", json={"init_info": init_info})

    async def shutdown_weight_transfer_engine(self) -> Outcome[None]:
        """Have every worker leave the transfer group."""
        return await self._do("/shutdown_weight_transfer_engine", "control")

    async def start_weight_update(self) -> Outcome[None]:
        """Begin a weight update; from here on the engine's weights are in flux."""
        return await self._do("/start_weight_update", "weights")

    async def update_weights(self, update_info: Any) -> Outcome[None]:
        """Receive weights; blocks while the sender sends."""
        return await self._do("/update_weights", "weights", json={"update_info": update_info})

    async def finish_weight_update(self, label: str) -> Outcome[None]:
        """End a weight update and attest ``label`` from then on."""
        return await self._do("/finish_weight_update", "weights", json={"weight_version": label})

    # ------------------------------------------------------------------ generating

    async def generate(self, request: GenerateRequest) -> Outcome[Generation]:
        """Sample one completion with the logprob of each sampled token."""
        body = {
            "model": self._model or None,
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": {"logprobs": 0, "detokenize": False, **request.sampling},
            "cache_salt": request.cache_salt,
            "stream": False,
        }
        headers = {"X-Request-Id": request.request}
        outcome = await self._json("POST", "/inference/v1/generate", "generate", json=body, headers=headers)
        if not isinstance(outcome, Ok):
            return outcome
        return generation_of(outcome.value)

    # ------------------------------------------------------------------ HTTP

    async def _do(self, path: str, deadline: str, *, json: Any = None) -> Outcome[None]:
        """Call a route that acts and says so in a JSON object; an error inside an answer of 200 is an error too."""
        outcome = await self._json("POST", path, deadline, json=json)
        match outcome:
            case Ok({"error": error}):
                return Failed(f"{path.partition('?')[0]} answered 200 with an error: {error}")
            case Ok({"success": False}):
                return Failed(f"{path.partition('?')[0]} answered success=false")
            case Ok(dict()):
                return Ok(None)
            case Ok():
                return Failed(f"{path.partition('?')[0]} answered something else than a JSON object")
        return outcome

    async def _do_silently(self, path: str, deadline: str) -> Outcome[None]:
        """Call a route whose answer is empty where it did what it should."""
        outcome = await self._bytes("POST", path, deadline)
        if isinstance(outcome, Ok) and outcome.value:
            return Failed(f"{path} answered {error_text(outcome.value)!r}, where it says nothing if it succeeds")
        return Ok(None) if isinstance(outcome, Ok) else outcome

    async def _json(
        self, method: str, path: str, deadline: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> Outcome[Any]:
        outcome = await self._bytes(method, path, deadline, json=json, headers=headers)
        if not isinstance(outcome, Ok):
            return outcome
        try:
            return Ok(msgspec.json.decode(outcome.value))
        except msgspec.DecodeError:
            return Failed(f"{path} answered something that is not JSON")

    async def _bytes(
        self, method: str, path: str, deadline: str, *, json: Any = None, headers: Mapping[str, str] | None = None
    ) -> Outcome[bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        sent = {**self._headers, **(headers or {})}
        return await self._request(self._session, method, path, self._deadlines_s[deadline], json, sent)

    async def _request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        deadline_s: float,
        json: Any,
        headers: Mapping[str, str],
    ) -> Outcome[bytes]:
        """Make one call and translate whatever happens into an outcome; nothing but cancellation is raised."""
        where = path.partition("?")[0]
        try:
            with anyio.fail_after(deadline_s):
                timeout = aiohttp.ClientTimeout(total=None)
                async with session.request(
                    method, self.url + path, json=json, headers=headers, timeout=timeout, allow_redirects=False
                ) as response:
                    content = bytearray()
                    while len(content) <= _MAX_ANSWER_BYTES and not response.content.at_eof():
                        content += await response.content.readany()
        except TimeoutError:
            return Unknown(f"{where} gave no answer within {deadline_s:g} s")
        except aiohttp.ClientConnectorError as error:
            message = f"{where} could not be reached: {error.strerror or error}"
            return _NothingListens(message) if error.os_error.errno == errno.ECONNREFUSED else Refused(message)
        except (aiohttp.ClientError, OSError) as error:
            return Unknown(f"{where}: the connection broke while waiting ({type(error).__name__}: {error})")
        if len(content) > _MAX_ANSWER_BYTES:
            return Failed(f"{where} answered more than {_MAX_ANSWER_BYTES} bytes", response.status)
        if response.status < 300:
            return Ok(bytes(content))
        message = f"{where} answered {response.status}: {error_text(bytes(content))}"
        if response.status >= 500 or response.status in _GAVE_UP:
            return Failed(message, response.status)
        return Refused(message, response.status)


class _NothingListens(Refused, frozen=True):
    """The address itself refuses connections: proof that no server is there. A bad route or name proves nothing."""


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or above 65535
        return False


def _words(outcome: Outcome[Any]) -> str:
    return "it answered 200" if isinstance(outcome, Ok) else outcome.message


def _field(outcome: Outcome[Any], name: str, kind: type) -> Any:
    value = outcome.value.get(name) if isinstance(outcome, Ok) and isinstance(outcome.value, dict) else None
    return value if isinstance(value, kind) else None
