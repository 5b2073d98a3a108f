"""Golden scripts: commands in a small notation, with the whole trace that they must cause.

A line of a script is one of::

    # a remark                              kept as it is
    ---                                     everything starts afresh
    > VERB ARGUMENT... KEY=VALUE... : WHY   a command; one second passes before it
    > wait SECONDS                          so many more seconds pass
    > serving ENGINE...                     fresh engines join and rc-0 is adopted, as in the first script
    > updating PHASE                        the same for e, which then takes part in u1 until it is in that phase

and below each command stands what it caused, which `rewritten` writes::

    SEQ +SECONDS kind  field=value ...      an event
    x ERROR: message                        the command was refused
    = ENGINE: PHASE ... | published ...     the state after it
    ~ EFFECT ENGINE                         what is called for now

Verbs are those of `_COMMANDS`. ``look``, ``pause``, ``preflight``, ``install``, ``caches``, ``validation`` and
``resume`` report what a healthy engine shows after that, but for the given keys; ``?`` could not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from rc import commands
from rc.commands import Command
from rc.errors import RolloutCoreError
from rc.events.types import Event, Span, Turn, UpdatePath
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
from rc.lifecycle import Phase
from rc.next_effects import Effect
from rc.projections.control import ControlState
from rc.versions import WeightIdentity, version_label
from tests.core.scenario import Core, serving, updating

_Words = tuple[list[str], dict[str, str], str]
"""A command's arguments, keys and reason."""


def rewritten(script: str) -> str:
    """Give the script with the trace that its commands cause now."""
    return "\n".join(_rewritten_lines(script.splitlines())) + "\n"


def _rewritten_lines(lines: list[str]) -> Iterator[str]:
    run = _Run()
    for line in lines:
        if line == "---":
            run = _Run()
        if line.startswith("> "):
            yield line
            yield from run.trace(line[2:])
        elif not line or line.startswith(("#", "---")):
            yield line


class _Run:
    """One history of a script."""

    def __init__(self) -> None:
        self.core = Core(at=0.0)
        self.seq = 0

    def trace(self, line: str) -> Iterator[str]:
        """Carry a command out and tell what it caused."""
        words, _, why = line.partition(" : ")
        verb, *rest = words.split()
        arguments = [word for word in rest if "=" not in word]
        keys = dict(word.split("=", 1) for word in rest if "=" in word)
        if verb == "wait":
            self.core.at += float(arguments[0])
            return
        if verb in ("serving", "updating"):
            self.core = serving(*arguments) if verb == "serving" else updating(Phase[arguments[0]])
            self.core.at = 0.0
            self.seq = sum(len(caused) for _, caused in self.core.decisions)
            yield from self.outlook()
            return
        try:
            caused = self.core.give(_COMMANDS[verb](self.core, (arguments, keys, why)))
        except RolloutCoreError as error:
            yield f"x {type(error).__name__}: {error}"
            return
        for event in caused:
            self.seq += 1
            yield f"{self.seq:5} +{event.at:<5g} {event.kind:<18} {_fields(event)}".rstrip()
        if not caused:
            yield "      no event"
        yield from self.outlook()

    def outlook(self) -> Iterator[str]:
        """Tell the state, and what it calls for."""
        yield "= " + _state(self.core.state)
        effects = ", ".join(_effect(effect) for effect in self.core.effects)
        if effects:
            yield f"~ {effects}"


# ------------------------------------------------------------------------------------------------------------- commands


def _start(core: Core, words: _Words) -> Command:
    arguments, keys, _ = words
    epoch = int(keys.get("epoch", core.state.epoch + 1))
    return commands.StartController(at=core.now, controller=arguments[0], epoch=epoch)


def _join(core: Core, words: _Words) -> Command:
    arguments, keys, _ = words
    observed = _observed(Observation(boot="b1", label="default", paused=False), keys)
    return commands.JoinEngine(
        at=core.now, engine=arguments[0], observed=observed, profile="stock", vllm="0.32", model="m", max_model_len=64
    )


def _lose(core: Core, words: _Words) -> Command:
    return commands.LoseEngine(at=core.now, engine=words[0][0], reason=words[2])


def _admit(core: Core, words: _Words) -> Command:
    arguments, keys, _ = words
    return commands.AdmitRollout(at=core.now, rollout=arguments[0], lease_s=float(keys.get("lease", 600)))


def _finish(core: Core, words: _Words) -> Command:
    arguments, keys, _ = words
    active = core.state.rollouts.active.get(arguments[0])
    label, tokens = version_label(active.version if active else 0), int(keys.get("tokens", 4))
    spans = tuple(_span(span) for span in keys.get("spans", f"{label}:0-{tokens}").split(",") if span != "none")
    turn = Turn(prompt_token_ids=(1, 2), token_ids=tuple(range(tokens)), logprobs=(-1.0,) * tokens, spans=spans)
    return commands.EndRollout(at=core.now, rollout=arguments[0], turns=(turn,))


def _span(text: str) -> Span:
    label, _, tokens = text.partition(":")
    start, _, end = tokens.partition("-")
    return Span(label=label, start=int(start), end=int(end))


def _abort(core: Core, words: _Words) -> Command:
    return commands.AbortRollouts(at=core.now, rollouts=tuple(words[0]), reason=words[2])


def _update(core: Core, words: _Words) -> Command:
    arguments, keys, _ = words
    identity = WeightIdentity(run=keys.get("run", "r"), step=int(keys["step"]))
    path = msgspec.convert(keys.get("path", "one_phase"), UpdatePath)
    return commands.StartUpdate(at=core.now, update=arguments[0], identity=identity, path=path)


def _abandon(core: Core, words: _Words) -> Command:
    return commands.AbandonUpdate(at=core.now, update=words[0][0], reason=words[2])


def _report(kind: type[Evidence], **defaults: Any) -> Callable[[Core, _Words], Command]:
    def command(core: Core, words: _Words) -> Command:
        arguments, keys, why = words
        engine, fields = core.state.engine(arguments[0]), dict(defaults)
        label = engine.label
        if kind is InstallReport and core.state.update is not None:
            label = version_label(core.state.update.target)
        shown = Observation(boot=engine.boot, label=label, paused=kind is not ResumeReport)
        for key, value in keys.items():
            if key in ("mutation", "checks"):
                fields[key] = tuple(value.split(",")) if key == "checks" else value
            elif key in ("prefix", "multimodal", "encoder", "connector"):
                fields[key] = value == "yes"
        unread = why if "?" in keys.values() else None
        observed = msgspec.structs.replace(_observed(shown, keys), problem=unread or None)
        fields |= {"observed": observed, "problem": why if why and not unread else None}
        if fields.get("checks") == ("none",):
            fields["checks"] = ()
        return commands.ReportEvidence(at=core.now, engine=engine.engine, evidence=msgspec.convert(fields, kind))

    return command


def _observed(shown: Observation, keys: dict[str, str]) -> Observation:
    for key in ("boot", "label"):
        if key in keys:
            shown = msgspec.structs.replace(shown, **{key: None if keys[key] == "?" else keys[key]})
    if "paused" in keys:
        shown = msgspec.structs.replace(shown, paused={"yes": True, "no": False, "?": None}[keys["paused"]])
    return shown


_COMMANDS: dict[str, Callable[[Core, _Words], Command]] = {
    "start": _start,
    "join": _join,
    "lose": _lose,
    "admit": _admit,
    "finish": _finish,
    "abort": _abort,
    "update": _update,
    "abandon": _abandon,
    "look": _report(LookReport),
    "pause": _report(PauseReport),
    "preflight": _report(PreflightReport),
    "install": _report(InstallReport, mutation="complete", sent_bytes=1000),
    "caches": _report(CacheReport, prefix=True, multimodal=True, encoder=True),
    "validation": _report(ValidationReport, checks=("boot", "label", "paused")),
    "resume": _report(ResumeReport),
}

# --------------------------------------------------------------------------------------------------------------- traces


def _fields(event: Event) -> str:
    fields = ((name, getattr(event, name)) for name in event.__struct_fields__ if name != "at")
    return " ".join(f"{name}={_value(value)}" for name, value in fields if value not in (None, "", ()))


def _value(value: object) -> str:
    match value:
        case WeightIdentity():
            return f"{value.run}/{value.step}"
        case Turn():
            spans = ",".join(f"{span.label}:{span.start}-{span.end}" for span in value.spans) or "unattested"
            return f"{len(value.token_ids)} tokens {spans}"
        case Observation():
            paused = {True: "paused", False: "running", None: "?"}[value.paused]
            problem = f"; {value.problem}" if value.problem else ""
            return f"{value.boot or '?'} {value.label or '?'} {paused}{problem}"
        case tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case str() if " " in value:
            return f'"{value}"'
        case str() | int() | float():
            return str(value)
        case _:
            return _evidence(value)


def _evidence(report: Any) -> str:
    tag = report.__struct_config__.tag
    names = [name for name in report.__struct_fields__ if name not in ("observed", "took_s", "problem")]
    extra = "".join(f" {name}={_value(getattr(report, name))}" for name in names if getattr(report, name) is not None)
    problem = f"; {report.problem}" if report.problem else ""
    return f"{tag}({_value(report.observed)}{extra}{problem})"


def _state(state: ControlState) -> str:
    parts = []
    for name in sorted(state.engines):
        engine = state.engines[name]
        holds = version_label(engine.version) if engine.version is not None else "no version"
        active = f", {engine.active} active" if engine.active else ""
        parts.append(f"{name}: {engine.phase.name}, {holds}{active}{', in doubt' if engine.in_doubt else ''}")
    if state.update is not None:
        parts.append(f"{state.update.update} to {version_label(state.update.target)}")
    published = version_label(state.published.version) if state.published else "nothing"
    return " | ".join([*parts, f"published {published}", f"next {version_label(state.next_version)}"])


def _effect(effect: Effect) -> str:
    return f"{type(effect).__name__} {effect.engine}"
