"""The adapter of real servers, against a fake one over real HTTP: whatever comes back is one of four outcomes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from rc.effects import vllm_http
from rc.effects.fake import FakeEngine, Fault
from rc.effects.fake_server import FakeServer
from rc.effects.protocol import Failed, GenerateRequest, Ok, Outcome, Refused, Unknown
from rc.effects.vllm_http import VllmHttpEngine
from rc.errors import EngineUnreachable
from rc.events.types import Span
from rc.evidence import Observation
from tests.controller.world import until
from tests.effects import hostile

REQUEST = GenerateRequest(
    request="r1-0",
    prompt_token_ids=tuple(range(1, 20)),
    sampling={"max_tokens": 3, "temperature": 0.0},
    cache_salt="rc-0",
)
SHORT = {"look": 0.2, "control": 0.2, "weights": 0.2, "generate": 0.2}
"""Deadlines for tests in which they pass; the others keep the real ones, which never do."""


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None,
    *,
    api_key: str | None = None,
    deadlines_s: dict[str, float] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[VllmHttpEngine, FakeServer]]:
    server = FakeServer(engine or FakeEngine(), **options)
    async with server.run() as url:
        adapter = VllmHttpEngine(url, api_key=api_key, deadlines_s=deadlines_s)
        try:
            yield adapter, server
        finally:
            await adapter.aclose()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Call = Callable[[VllmHttpEngine], Awaitable[Outcome[Any]]]

CALLS: dict[str, Call] = {
    "/pause": lambda engine: engine.pause(),
    "/resume": lambda engine: engine.resume(),
    "/reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "/reset_mm_cache": lambda engine: engine.reset_multimodal_cache(),
    "/reset_encoder_cache": lambda engine: engine.reset_encoder_cache(),
    "/update_weight_version": lambda engine: engine.set_label("rc-3"),
    "/get_world_size": lambda engine: engine.world_size(),
    "/init_weight_transfer_engine": lambda engine: engine.init_weight_transfer_engine({"world_size": 2}),
    "/shutdown_weight_transfer_engine": lambda engine: engine.shutdown_weight_transfer_engine(),
    "/start_weight_update": lambda engine: engine.start_weight_update(),
    "/update_weights": lambda engine: engine.update_weights({"content": "w1"}),
    "/finish_weight_update": lambda engine: engine.finish_weight_update("rc-3"),
    "/inference/v1/generate": lambda engine: engine.generate(REQUEST),
}
SCRIPTED = {
    "/pause": "pause",
    "/resume": "resume",
    "/reset_prefix_cache": "reset_prefix_cache",
    "/reset_mm_cache": "reset_multimodal_cache",
    "/reset_encoder_cache": "reset_encoder_cache",
    "/update_weight_version": "set_label",
    "/start_weight_update": "start_weight_update",
    "/inference/v1/generate": "generate",
}
EMPTY_ANSWERS = {"/reset_mm_cache", "/reset_encoder_cache"}
every_call = pytest.mark.parametrize("path", CALLS)


class TestOutcomes:
    @every_call
    async def test_done(self, path: str) -> None:
        engine = FakeEngine()
        engine.updating = path in ("/update_weights", "/finish_weight_update")
        async with serving(engine) as (adapter, _):
            assert isinstance(await CALLS[path](adapter), Ok)

    @every_call
    @pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 422, 429])
    async def test_what_the_server_rejects_is_refused(self, path: str, code: int) -> None:
        async with serving(answers={path: hostile.status(code)}) as (adapter, _):
            outcome = await CALLS[path](adapter)
        assert isinstance(outcome, Refused)
        assert outcome.status == code
        assert path in outcome.message
        assert f"made to answer {code}" in outcome.message

    @every_call
    @pytest.mark.parametrize("code", [408, 500, 501, 502, 503, 504])
    async def test_what_the_server_could_not_do_is_failed(self, path: str, code: int) -> None:
        async with serving(answers={path: hostile.status(code)}) as (adapter, _):
            outcome = await CALLS[path](adapter)
        assert isinstance(outcome, Failed)
        assert outcome.status == code
        assert f"made to answer {code}" in outcome.message

    @every_call
    @pytest.mark.parametrize("way", [hostile.silence, hostile.trickle], ids=["silent", "trickling"])
    async def test_past_the_deadline_nothing_is_known(self, path: str, way: hostile.Handler) -> None:
        async with serving(answers={path: way}, deadlines_s=SHORT) as (adapter, _):
            outcome = await CALLS[path](adapter)
        assert isinstance(outcome, Unknown)
        assert "0.2 s" in outcome.message

    @every_call
    @pytest.mark.parametrize("way", [hostile.cut, hostile.cut_in_the_middle], ids=["before", "within"])
    async def test_where_the_connection_breaks_nothing_is_known(self, path: str, way: hostile.Handler) -> None:
        async with serving(answers={path: way}) as (adapter, _):
            outcome = await CALLS[path](adapter)
        assert isinstance(outcome, Unknown)
        assert "broke" in outcome.message

    @every_call
    async def test_where_nothing_listens_it_did_not_happen(self, path: str) -> None:
        adapter = VllmHttpEngine(f"http://127.0.0.1:{free_port()}")
        outcome = await CALLS[path](adapter)
        await adapter.aclose()
        assert isinstance(outcome, Refused)
        assert outcome.status is None

    @every_call
    async def test_a_redirect_is_not_followed(self, path: str) -> None:
        async with (
            serving() as (_, elsewhere),
            serving(answers={path: hostile.redirect(elsewhere.url)}) as (adapter, _),
        ):
            outcome = await CALLS[path](adapter)
            assert elsewhere.seen == []
        assert isinstance(outcome, Refused)
        assert outcome.status == 307

    @every_call
    async def test_an_answer_without_end_is_cut_short(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_http, "_MAX_ANSWER_BYTES", 100_000)
        async with serving(answers={path: hostile.flood(10**9)}) as (adapter, server):
            outcome = await CALLS[path](adapter)
            await until(lambda: server.left_early == [path])
        assert isinstance(outcome, Failed)
        assert "more than 100000 bytes" in outcome.message

    @every_call
    @pytest.mark.parametrize(
        "body",
        [b"<html>It works!</html>", b"\xff\xfe\x00", b'{"is_paused": tr', b"[[[[", b"null", b"[1]", b'"ok"', b"7"],
    )
    async def test_an_answer_of_another_kind_is_no_success(self, path: str, body: bytes) -> None:
        async with serving(answers={path: hostile.raw(body)}) as (adapter, _):
            assert isinstance(await CALLS[path](adapter), Failed)

    @pytest.mark.parametrize("path", CALLS.keys() - EMPTY_ANSWERS)
    async def test_an_empty_answer_is_no_success_where_one_is_due(self, path: str) -> None:
        async with serving(answers={path: hostile.raw(b"")}) as (adapter, _):
            assert isinstance(await CALLS[path](adapter), Failed)

    @every_call
    @pytest.mark.parametrize("body", [{"error": "no"}, {"error": {"message": "no", "code": 500}}, {"success": False}])
    async def test_an_error_inside_an_answer_of_200_is_no_success(self, path: str, body: object) -> None:
        async with serving(answers={path: hostile.says(body)}) as (adapter, _):
            outcome = await CALLS[path](adapter)
        if path == "/reset_prefix_cache" and body == {"success": False}:
            assert outcome == Ok(False)  # the one route with a value: its word, which the core looks at
        else:
            assert isinstance(outcome, Failed)

    @pytest.mark.parametrize("path", SCRIPTED)
    @pytest.mark.parametrize(
        ("scripted", "kind"),
        [(Refused("bad", 400), Refused), (Failed("boom", 500), Failed), (Unknown("lost"), Unknown)],
        ids=["refused", "failed", "unknown"],
    )
    async def test_the_fake_server_gives_the_outcome_of_its_script(
        self, path: str, scripted: Refused | Failed | Unknown, kind: type
    ) -> None:
        engine = FakeEngine()
        engine.script(SCRIPTED[path], Fault(outcome=scripted))
        async with serving(engine) as (adapter, _):
            outcome = await CALLS[path](adapter)
        assert type(outcome) is kind

    async def test_another_protocol_is_no_answer(self) -> None:
        server = await asyncio.start_server(hostile.garbage_protocol, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            adapter = VllmHttpEngine(f"http://127.0.0.1:{port}")
            assert isinstance(await adapter.pause(), Unknown)
            with pytest.raises(EngineUnreachable):
                await adapter.probe()
            await adapter.aclose()


class TestRequests:
    async def test_what_is_sent_is_what_vllm_expects(self) -> None:
        engine = FakeEngine()
        async with serving(engine, api_key="secret") as (adapter, server):
            for call in CALLS.values():
                await call(adapter)
            sent = {seen.path: seen for seen in server.seen}
        assert sent["/pause"].query == {"mode": "abort", "clear_cache": "false"}
        assert sent["/update_weight_version"].json == {"new_version": "rc-3"}
        assert sent["/init_weight_transfer_engine"].json == {"init_info": {"world_size": 2}}
        assert sent["/update_weights"].json == {"update_info": {"content": "w1"}}
        assert sent["/finish_weight_update"].json == {"weight_version": "rc-3"}
        generate = sent["/inference/v1/generate"]
        assert generate.headers["x-request-id"] == "r1-0"
        assert generate.json == {
            "model": None,
            "token_ids": list(range(1, 20)),
            "sampling_params": {"logprobs": 0, "detokenize": False, "max_tokens": 3, "temperature": 0.0},
            "cache_salt": "rc-0",
            "stream": False,
        }
        assert {seen.headers.get("authorization") for seen in server.seen} == {"Bearer secret"}
        assert all(seen.method == "POST" for path, seen in sent.items() if path != "/get_world_size")

    async def test_an_update_goes_through_the_routes_of_vllm(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as (adapter, _):
            await adapter.pause()
            for call in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
                assert isinstance(await CALLS[call](adapter), Ok)
            assert isinstance(await adapter.start_weight_update(), Ok)
            again = await adapter.start_weight_update()
            assert isinstance(again, Failed)
            observed = await adapter.observe()
        assert (engine.content, observed.label, observed.paused) == ("in flux", "rc-3", True)

    async def test_cancelling_a_generation_closes_its_connection(self) -> None:
        engine = FakeEngine(token_s=60.0)
        async with serving(engine) as (adapter, server):
            with anyio.move_on_after(0.1):
                await adapter.generate(REQUEST)
            await until(lambda: server.left_early == ["/inference/v1/generate"])

    async def test_a_control_call_goes_on_without_its_client(self) -> None:
        """Which is why a deadline that passed means that the outcome is unknown."""
        engine = FakeEngine(control_s=0.3)
        async with serving(engine, deadlines_s={"control": 0.05}) as (adapter, _):
            assert isinstance(await adapter.pause(), Unknown)
            assert not engine.paused
            await anyio.sleep(0.5)
            assert engine.paused

    async def test_a_call_is_never_sent_twice(self) -> None:
        async with serving(answers={"/pause": hostile.cut}) as (adapter, server):
            for _ in range(3):
                assert isinstance(await adapter.resume(), Ok)
                assert isinstance(await adapter.pause(), Unknown)
            assert [seen.path for seen in server.seen].count("/pause") == 3

    async def test_no_connection_stays_open(self) -> None:
        async with serving() as (adapter, _):
            await adapter.probe()
            await adapter.aclose()
            await adapter.observe()
            session = adapter._session
            await adapter.aclose()
            assert session is not None
            assert session.closed
            await adapter.aclose()


class TestGenerate:
    async def test_tokens_logprobs_spans_and_cached_tokens(self) -> None:
        async with serving(answers={"/inference/v1/generate": hostile.says(hostile.completion())}) as (adapter, _):
            outcome = await adapter.generate(REQUEST)
        assert isinstance(outcome, Ok)
        generation = outcome.value
        assert generation.token_ids == (5, 6)
        assert generation.logprobs == (-0.25, -1.5)
        assert generation.spans == (Span(label="rc-0", start=0, end=2),)
        assert (generation.finish_reason, generation.cached_tokens) == ("length", 16)

    async def test_it_is_what_the_engine_sampled(self) -> None:
        engine = FakeEngine()
        engine.label = "rc-0"
        async with serving(engine) as (adapter, _):
            first = await adapter.generate(REQUEST)
            second = await adapter.generate(REQUEST)
            direct = await engine.generate(REQUEST)
        assert isinstance(first, Ok)
        assert isinstance(second, Ok)
        assert second == direct
        assert (first.value.cached_tokens, second.value.cached_tokens) == (0, 16)

    async def test_a_server_that_does_not_tell_cached_tokens(self) -> None:
        async with serving(prompt_tokens_details=False) as (adapter, _):
            outcome = await adapter.generate(REQUEST)
        assert isinstance(outcome, Ok)
        assert outcome.value.cached_tokens is None

    async def test_an_aborted_generation_is_an_answer(self) -> None:
        aborted = hostile.completion(finish_reason="abort", token_ids=None, logprobs=None, weight_versions=None)
        async with serving(answers={"/inference/v1/generate": hostile.says(aborted)}) as (adapter, _):
            outcome = await adapter.generate(REQUEST)
        assert isinstance(outcome, Ok)
        assert (outcome.value.finish_reason, outcome.value.token_ids) == ("abort", ())

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"logprobs": None}, "no logprobs"),
            ({"logprobs": {"content": None}}, "no logprobs"),
            ({"logprobs": {"content": []}}, "no logprobs"),
            ({"logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}, "other tokens"),
            (
                {"logprobs": {"content": [{"token_id": 6, "logprob": -1.0}, {"token_id": 5, "logprob": -1.0}]}},
                "other tokens",
            ),
            ({"logprobs": {"content": [{"token_id": 5, "logprob": "high"}]}}, "something else"),
            ({"token_ids": None}, "other tokens"),
            ({"token_ids": ["5", "6"]}, "something else"),
            ({"token_ids": "56"}, "something else"),
            ({"weight_versions": [{"version": 7, "start": 0, "end": 2}]}, "something else"),
            ({"finish_reason": 3}, "something else"),
        ],
    )
    async def test_what_does_not_fit_together_is_failed(self, changes: dict[str, object], words: str) -> None:
        body = hostile.completion(**changes)
        async with serving(answers={"/inference/v1/generate": hostile.says(body)}) as (adapter, _):
            outcome = await adapter.generate(REQUEST)
        assert isinstance(outcome, Failed)
        assert words in outcome.message

    @pytest.mark.parametrize("choices", [[], [hostile.completion()["choices"][0]] * 2, None, {}, [None]])
    async def test_there_is_exactly_one_choice(self, choices: object) -> None:
        body = {**hostile.completion(), "choices": choices}
        async with serving(answers={"/inference/v1/generate": hostile.says(body)}) as (adapter, _):
            assert isinstance(await adapter.generate(REQUEST), Failed)


class TestObserve:
    async def test_label_pause_state_and_boot_in_this_order(self) -> None:
        engine = FakeEngine()
        engine.label, engine.paused = "rc-4", True
        async with serving(engine) as (adapter, server):
            observed = await adapter.observe()
            assert [seen.path for seen in server.seen] == ["/weight_info", "/is_paused", "/metrics"]
            engine.restart()
            again = await adapter.observe()
        assert observed == Observation(boot=observed.boot, label="rc-4", paused=True)
        assert observed.boot
        assert again == Observation(boot=again.boot, label="default", paused=False)
        assert again.boot != observed.boot

    @pytest.mark.parametrize("path", ["/weight_info", "/is_paused", "/metrics"])
    @pytest.mark.parametrize(
        "way",
        [
            hostile.status(500),
            hostile.status(404),
            hostile.cut,
            hostile.raw(b"hello"),
            hostile.says({"is_paused": "no"}),
        ],
        ids=["500", "404", "cut", "not JSON", "wrong type"],
    )
    async def test_what_cannot_be_read_is_none_and_the_rest_is_there(self, path: str, way: hostile.Handler) -> None:
        async with serving(answers={path: way}) as (adapter, _):
            observed = await adapter.observe()
        unread = {"/weight_info": observed.label, "/is_paused": observed.paused, "/metrics": observed.boot}
        assert unread.pop(path) is None
        assert None not in unread.values()
        assert not observed.gone

    async def test_what_was_wrong_is_said(self) -> None:
        answers = {"/weight_info": hostile.status(500), "/is_paused": hostile.cut}
        async with serving(answers=answers) as (adapter, _):
            observed = await adapter.observe()
        assert observed.problem is not None
        assert "made to answer 500" in observed.problem
        assert "/is_paused" in observed.problem

    async def test_gone_is_only_what_no_longer_listens(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as (adapter, server):
            assert not (await adapter.observe()).gone
            engine.die()
            dying = await adapter.observe()
            assert dying.boot is None
            assert not dying.gone
            await server.stop()
            dead = await adapter.observe()
            assert dead.gone
            assert dead.problem
            engine.restart()
            await server.listen()
            assert (await adapter.observe()).label == "default"

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    async def test_a_closed_port_is_gone(self, host: str) -> None:
        adapter = VllmHttpEngine(f"http://{host}:{free_port()}")
        assert (await adapter.observe()).gone
        await adapter.aclose()

    async def test_a_name_that_cannot_be_resolved_is_not_gone(self) -> None:
        """The engine may run on: it is this machine that cannot find it."""
        adapter = VllmHttpEngine("http://engine.invalid:8000")
        observed = await adapter.observe()
        await adapter.aclose()
        assert not observed.gone
        assert observed.boot is None

    async def test_an_engine_that_does_not_answer_in_time_is_not_gone(self) -> None:
        answers = dict.fromkeys(("/weight_info", "/is_paused", "/metrics"), hostile.silence)
        async with serving(answers=answers, deadlines_s=SHORT) as (adapter, _):
            observed = await adapter.observe()
        assert observed == Observation(problem=observed.problem)


class TestProbe:
    async def test_facts(self) -> None:
        engine = FakeEngine()
        engine.max_model_len, engine.model_root = 77, "/models/policy"
        async with serving(engine) as (adapter, _):
            facts = await adapter.probe()
            await adapter.generate(REQUEST)
        assert (facts.vllm, facts.model, facts.model_root) == ("0.32.0", "policy", "/models/policy")
        assert (facts.max_model_len, facts.profile, facts.missing) == (77, "stock", ())
        assert len(facts.exposed) == 1
        assert "without a key" in facts.exposed[0]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"dev_mode": False}, ["/is_paused", "/weight_info", "VLLM_SERVER_DEV_MODE=1"]),
            ({"scale_out": False}, ["/inference/v1/generate", "--enable-scale-out"]),
            ({"answers": {"/metrics": hostile.raw(b"# nothing\n")}}, ["/metrics", "process_start_time_seconds"]),
            ({"answers": {"/inference/v1/generate": hostile.says({})}}, ["/inference/v1/generate", "200"]),
            ({"answers": {"/inference/v1/generate": hostile.status(500)}}, ["/inference/v1/generate", "500"]),
        ],
        ids=["no dev mode", "no scale-out", "no boot", "accepts anything", "generate broken"],
    )
    async def test_what_is_missing_says_what_to_do(self, options: dict[str, Any], words: list[str]) -> None:
        async with serving(**options) as (adapter, _):
            facts = await adapter.probe()
        text = "\n".join(facts.missing)
        for word in words:
            assert word in text

    async def test_an_api_key_is_asked_for(self) -> None:
        server = FakeServer(FakeEngine(), api_key="secret")
        async with server.run() as url:
            for key, words in ((None, "asks for an API key"), ("wrong", "does not accept this API key")):
                adapter = VllmHttpEngine(url, api_key=key)
                with pytest.raises(EngineUnreachable, match=words):
                    await adapter.probe()
                await adapter.aclose()
            adapter = VllmHttpEngine(url, api_key="secret")
            assert (await adapter.probe()).missing == ()
            assert isinstance(await adapter.generate(REQUEST), Ok)
            await adapter.aclose()

    @pytest.mark.parametrize(
        "answers",
        [
            {"/version": hostile.raw(b"<html>It works!</html>")},
            {"/version": hostile.status(404)},
            {"/version": hostile.says({"version": 3})},
            {"/version": hostile.says([])},
            {"/version": hostile.redirect("http://127.0.0.1:1/")},
            {"/v1/models": hostile.says({"data": []})},
            {"/v1/models": hostile.says({"data": [{"id": None}]})},
            {"/v1/models": hostile.status(503)},
            {"/version": hostile.cut},
        ],
    )
    async def test_what_is_no_vllm_is_said_to_be_none(self, answers: dict[str, hostile.Handler]) -> None:
        async with serving(answers=answers) as (adapter, _):
            with pytest.raises(EngineUnreachable) as caught:
                await adapter.probe()
        assert adapter.url in str(caught.value)

    async def test_odd_types_do_not_break_it(self) -> None:
        card = {"id": "policy", "root": 5, "max_model_len": "long"}
        async with serving(answers={"/v1/models": hostile.says({"data": [card]})}) as (adapter, _):
            facts = await adapter.probe()
        assert (facts.model_root, facts.max_model_len) == ("", 0)

    @pytest.mark.parametrize(
        "url", ["", "127.0.0.1:8000", "ftp://host", "http://", "run.db", "http://host:99999", "http://host:port"]
    )
    def test_a_url_that_is_none_is_refused_at_once(self, url: str) -> None:
        with pytest.raises(EngineUnreachable, match=r"http://127\.0\.0\.1:8000"):
            VllmHttpEngine(url)

    async def test_nothing_listens(self) -> None:
        adapter = VllmHttpEngine(f"http://127.0.0.1:{free_port()}")
        with pytest.raises(EngineUnreachable, match="no vLLM answers"):
            await adapter.probe()
        await adapter.aclose()
