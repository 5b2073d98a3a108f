"""What a server, or something in front of it, can answer that no client should fall for; each handles a route."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def status(code: int, body: object = None) -> Handler:
    """Answer with a status, and vLLM's error body unless another is given."""
    error = {"error": {"message": f"made to answer {code}", "type": "X", "param": None, "code": code}}

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response(error if body is None else body, status=code)

    return handle


def says(body: object) -> Handler:
    """Answer 200 with a JSON body."""
    return status(200, body)


def raw(content: bytes, content_type: str = "text/html") -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=content, content_type=content_type)

    return handle


async def silence(_: web.Request) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def cut(request: web.Request) -> web.StreamResponse:
    """Reset the connection before any byte of the answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def cut_in_the_middle(request: web.Request) -> web.StreamResponse:
    """Promise more than is sent, then reset the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"is_pau')
    assert request.transport is not None
    request.transport.abort()
    return response


async def trickle(request: web.Request) -> web.StreamResponse:
    """Send a byte now and then: never idle, never done."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


def flood(total: int) -> Handler:
    """Send more than anybody wants, without saying how much it will be."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(total // 65536 + 1):
            await response.write(b"x" * 65536)
        return response

    return handle


def redirect(to: str) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": to})

    return handle


async def garbage_protocol(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Speak another protocol, for `asyncio.start_server`."""
    await reader.readline()
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await writer.drain()
    writer.close()


def completion(**changes: Any) -> dict[str, Any]:
    """A completion of two tokens as vLLM answers it, with the choice's fields replaced."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.25}, {"token_id": 6, "logprob": -1.5}]},
        "weight_versions": [{"version": "rc-0", "start": 0, "end": 2}],
    }
    usage = {"prompt_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    return {"request_id": "generate-tokens-q", "choices": [{**choice, **changes}], "usage": usage}
