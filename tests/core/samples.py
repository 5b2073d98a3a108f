"""One well-formed sample of every event and every command, all fields set."""

from __future__ import annotations

from rc import commands
from rc.commands import Command
from rc.events import types as events
from rc.events.types import Event, Span, Turn
from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    Observation,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.versions import WeightIdentity

IDENTITY = WeightIdentity(run="r", step=3, checkpoint="/ckpt/3", content_digest="ab" * 32)
OBSERVED = Observation(boot="b1", label="rc-0", paused=True)
TURN = Turn(
    prompt_token_ids=(1, 2),
    token_ids=(3, 4),
    logprobs=(-0.25, -1e-3),
    spans=(Span(label="rc-0", start=0, end=2),),
    finish_reason="stop",
    sampling={"temperature": 1.0, "max_tokens": 2, "stop": ["\n"]},
    cached_tokens=0,
    request="q-1",
    started_at=1.5,
    finished_at=2.5,
)
EVIDENCE: tuple[Evidence, ...] = (
    LookReport(observed=Observation(gone=True, problem="connection refused"), took_s=0.1, problem="dead"),
    PauseReport(observed=OBSERVED, took_s=0.1),
    PreflightReport(observed=OBSERVED, took_s=0.1),
    InstallReport(observed=OBSERVED, took_s=0.1, mutation="complete", sent_bytes=5),
    CacheReport(observed=OBSERVED, took_s=0.1, prefix=True, multimodal=True, encoder=True, connector=True),
    ValidationReport(observed=OBSERVED, took_s=0.1, checks=("label",)),
    ResumeReport(observed=OBSERVED, took_s=0.1),
)
LOOK, PAUSE, PREFLIGHT, INSTALL, CACHES, VALIDATION, RESUME = EVIDENCE

EVENTS: tuple[Event, ...] = (
    events.ControllerStarted(at=1.0, controller="c1", epoch=1, rules=2),
    events.EngineJoined(
        at=2.0,
        engine="e",
        boot="b1",
        label="default",
        profile="plugin",
        vllm="0.32.0",
        model="m",
        max_model_len=9,
        manifest_digest="cd",
    ),
    events.EngineLost(at=3.0, engine="e", boot="b1", reason="killed"),
    events.Admit(at=4.0, rollout="r1", engine="e", version=0, lease_s=60.0),
    events.FinishRollout(at=5.0, rollout="r1", engine="e", version=0, turns=(TURN,)),
    events.AbortRollout(at=6.0, rollout="r1", engine="e", version=0, reason="cancelled", turns=(TURN,)),
    events.RequestUpdate(
        at=7.0,
        update="u",
        target=1,
        identity=IDENTITY,
        path="one_phase",
        engines=("e", "f"),
        backend="gloo",
        manifest_digest="cd",
        nbytes=8,
    ),
    events.Drain(at=8.0, update="u", engine="e", active=2),
    events.Quiesced(at=9.0, update="u", engine="e", evidence=PauseReport(observed=OBSERVED, took_s=0.1)),
    events.BeginUpdate(at=10.0, update="u", engine="e", target=1, base=0, evidence=PreflightReport(observed=OBSERVED)),
    events.Installed(
        at=11.0, update="u", engine="e", target=1, evidence=InstallReport(observed=OBSERVED, mutation="complete")
    ),
    events.Invalidated(at=12.0, update="u", engine="e", evidence=CacheReport(observed=OBSERVED, prefix=True)),
    events.Validated(at=13.0, update="u", engine="e", evidence=ValidationReport(observed=OBSERVED, checks=("label",))),
    events.Resumed(at=14.0, update="u", engine="e", evidence=ResumeReport(observed=OBSERVED)),
    events.Committed(at=15.0, update="u", version=1, identity=IDENTITY, engines=("e",)),
    events.UpdateAbandoned(at=16.0, update="u", reason="cancelled", evidence=LOOK),
    events.Tainted(at=17.0, engine="e", reason="in doubt", update="u", evidence=INSTALL),
)

COMMANDS: tuple[Command, ...] = (
    commands.StartController(at=1.0, controller="c1", epoch=1),
    commands.JoinEngine(
        at=2.0,
        engine="e",
        observed=OBSERVED,
        profile="stock",
        vllm="0.32.0",
        model="m",
        max_model_len=9,
        manifest_digest="cd",
    ),
    commands.LoseEngine(at=3.0, engine="e", reason="killed"),
    commands.AdmitRollout(at=4.0, rollout="r1", lease_s=60.0),
    commands.EndRollout(at=5.0, rollout="r1", turns=(TURN,)),
    commands.AbortRollouts(at=6.0, rollouts=("r1",), reason="cancelled", turns=(TURN,)),
    commands.StartUpdate(
        at=7.0, update="u", identity=IDENTITY, path="one_phase", backend="gloo", manifest_digest="cd", nbytes=8
    ),
    commands.AbandonUpdate(at=8.0, update="u", reason="cancelled"),
    *(commands.ReportEvidence(at=9.0, engine="e", evidence=evidence) for evidence in EVIDENCE),
)
