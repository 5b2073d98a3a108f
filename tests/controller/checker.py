"""What must hold of any journal, written from the contract alone: it reads the text of records and no fold of rc's.

The engine's ground truth is its arithmetic: which tokens which weights give to which prompt. The identity that a
version was committed under tells which weights those are.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rc.events.journal import Record

__all__ = ("Checker", "Violation", "check", "tokens_of")

Body = Mapping[str, Any]

STEPS: Final = (
    "request_update",
    "drain",
    "quiesced",
    "begin_update",
    "installed",
    "invalidated",
    "validated",
    "resumed",
    "committed",
)
"""The only way from one version to the next."""


class Violation(AssertionError):
    """An invariant that does not hold, at a record."""

    def __init__(self, record: Record, problem: str) -> None:
        super().__init__(f"record {record.seq} ({record.kind}): {problem}\n  {record.body}")


def tokens_of(content: str, prompt: Sequence[int], count: int) -> list[int]:
    """What weights give to a prompt."""
    texts = (f"{content} {tuple(prompt)} {position}" for position in range(count))
    return [int.from_bytes(hashlib.sha256(text.encode()).digest()[:2], "big") % 1000 for text in texts]


def content_of(identity: Body) -> str:
    """Which weights an identity stands for in the simulation."""
    return "as loaded" if identity["run"] == "initial" else f"w{identity['step']}"


class Checker:
    """Reads records in order. Each method gives what is wrong with one kind of event, or None."""

    def __init__(self) -> None:
        self.contents: dict[int, str] = {}
        self.published: int | None = None
        self.holds: int | None = None
        """The version that was committed to the engine's present process."""
        self.base: int | None = None
        self.boot = ""
        self.tainted_boots: set[str] = set()
        self.resuming = False
        self.active: dict[str, Body] = {}
        self.ended: set[str] = set()
        self.update: str | None = None
        self.done: dict[str, list[str]] = defaultdict(list)
        self.targets: dict[str, int] = {}
        self.burnt: set[int] = set()
        self.epoch = 0
        self._checks: dict[str, Callable[[Body], str | None]] = {
            "controller_started": self.controller_started,
            "engine_joined": self.engine_joined,
            "engine_lost": self.engine_lost,
            "admit": self.admit,
            "finish_rollout": self.finish_rollout,
            "abort_rollout": self.end_rollout,
            "request_update": self.request_update,
            "drain": self.drain,
            "quiesced": self.quiesced,
            "begin_update": self.begin_update,
            "installed": self.installed,
            "invalidated": self.invalidated,
            "validated": self.validated,
            "resumed": self.resumed,
            "committed": self.committed,
            "update_abandoned": self.update_abandoned,
            "tainted": self.tainted,
        }

    def check(self, record: Record) -> None:
        problem = self._checks[record.kind](json.loads(record.body))
        if problem is not None:
            raise Violation(record, problem)

    # -------------------------------------------------------------------------------------------------------- rollouts

    def admit(self, body: Body) -> str | None:
        rollout = body["rollout"]
        if self.holds is None or self.resuming or self.boot in self.tainted_boots:
            return "is admitted where no engine serves"
        if self.update is not None:
            return "is admitted during an update"
        if not body["version"] == self.published == self.holds:
            return f"is bound to another version than {self.published}, which is published"
        if rollout in self.active or rollout in self.ended:
            return "is admitted twice"
        self.active[rollout] = body
        return None

    def end_rollout(self, body: Body) -> str | None:
        admitted = self.active.pop(body["rollout"], None)
        if admitted is None:
            return "ends without being active"
        self.ended.add(body["rollout"])
        return None if admitted["version"] == body["version"] else "ends under another version than it began under"

    def finish_rollout(self, body: Body) -> str | None:
        problem = self.end_rollout(body)
        content = self.contents[body["version"]]
        for turn in body["turns"]:
            tokens = turn["token_ids"]
            if any(span["label"] != f"rc-{body['version']}" for span in turn.get("spans", ())):
                return "holds tokens that the engine attests to another version"
            if tokens != tokens_of(content, turn["prompt_token_ids"], len(tokens)):
                return f"holds tokens that {content!r} does not give"
        return problem

    # --------------------------------------------------------------------------------------------------------- updates

    def _advance(self, kind: str, body: Body) -> str | None:
        done = self.done[body["update"]]
        due = STEPS[len(done)] if tuple(done) == STEPS[: len(done)] and len(done) < len(STEPS) else "nothing"
        done.append(kind)
        return None if kind == due else f"comes where {due} is due"

    def request_update(self, body: Body) -> str | None:
        if self.update is not None:
            return f"is requested while {self.update} is in progress"
        if body["target"] in self.burnt:
            return "reuses a number under which an engine may hold other weights"
        if self.published is not None and body["target"] <= self.published:
            return "does not go forward"
        self.update, self.targets[body["update"]] = body["update"], body["target"]
        return self._advance("request_update", body)

    def drain(self, body: Body) -> str | None:
        if body["active"] != len(self.active):
            return f"counts {body['active']} active rollouts where there are {len(self.active)}"
        return self._advance("drain", body)

    def quiesced(self, body: Body) -> str | None:
        if self.active:
            return f"comes while {sorted(self.active)} are active"
        return self._look(body, paused=True) or self._advance("quiesced", body)

    def begin_update(self, body: Body) -> str | None:
        if self.active:
            return f"comes while {sorted(self.active)} are active"
        self.base, self.holds = self.holds, None
        self.burnt.add(body["target"])
        return self._look(body, paused=True) or self._advance("begin_update", body)

    def installed(self, body: Body) -> str | None:
        if body["evidence"]["observed"].get("label") != f"rc-{self.targets[body['update']]}":
            return "is not attested by the engine"
        return self._look(body, paused=True) or self._advance("installed", body)

    def invalidated(self, body: Body) -> str | None:
        evidence = body["evidence"]
        if not all(evidence.get(cache) for cache in ("prefix", "multimodal", "encoder")):
            return "leaves a cache as it was"
        return self._look(body, paused=True) or self._advance("invalidated", body)

    def validated(self, body: Body) -> str | None:
        self.holds = self.targets[body["update"]]
        return self._look(body, paused=True) or self._advance("validated", body)

    def resumed(self, body: Body) -> str | None:
        if self.boot in self.tainted_boots:
            return "puts a tainted engine back into service"
        if self.resuming:
            self.resuming = False
            return self._look(body, paused=False)
        return self._look(body, paused=False) or self._advance("resumed", body)

    def committed(self, body: Body) -> str | None:
        self.published = body["version"]
        self.contents[body["version"]] = content_of(body["identity"])
        self.burnt.discard(body["version"])
        self.update = None
        if body["version"] != self.holds:
            return "publishes what the engine does not hold"
        return self._advance("committed", body)

    def update_abandoned(self, body: Body) -> str | None:
        done = self.done[body["update"]]
        if body["update"] != self.update or "installed" in done:
            return "abandons an update that is not in progress, or whose weights are installed"
        if "begin_update" in done:
            self.holds = self.base
            self.burnt.discard(self.targets[body["update"]])
        self.update, self.resuming = None, True
        return None

    def _look(self, body: Body, *, paused: bool) -> str | None:
        observed = body["evidence"]["observed"]
        if observed.get("boot") != self.boot:
            return "is not proven by the process that it is about"
        return None if observed.get("paused") is paused else f"is not proven: the engine's paused is not {paused}"

    # --------------------------------------------------------------------------------------------------------- engines

    def controller_started(self, body: Body) -> str | None:
        newer, self.epoch = body["epoch"] > self.epoch, body["epoch"]
        return None if newer else "does not have a newer epoch"

    def engine_joined(self, body: Body) -> str | None:
        self.boot, self.holds, self.resuming = body["boot"], None, False
        return None

    def engine_lost(self, body: Body) -> str | None:
        self.holds, self.resuming = None, False
        if self.active or self.update:
            return f"leaves {sorted(self.active)} active, or {self.update} in progress"
        return None

    def tainted(self, body: Body) -> str | None:
        self.holds, self.resuming = None, False
        self.tainted_boots.add(self.boot)
        if self.update is not None:
            self.burnt.add(self.targets[self.update])
            self.update = None
        return None if body["reason"] else "gives no reason"


def check(records: Iterable[Record]) -> Checker:
    """Check a whole journal.

    Raises:
        Violation: At the first record that breaks an invariant.
    """
    checker = Checker()
    due = 0
    for seq, record in enumerate(records, start=1):
        due = (record.events if record.command is not None else due) - 1
        if record.seq != seq or due < 0:
            raise Violation(record, f"is not number {seq}, or belongs to no decision")
        checker.check(record)
    return checker
