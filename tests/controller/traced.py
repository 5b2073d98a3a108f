"""A history together with every state that the engine was in while the journal ended where it did.

A crash leaves some prefix of the journal and some state of the engine. Which pairs are possible is not argued here but
recorded: whenever either of the two changes, both are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from rc.effects.fake import FakeEngine
from rc.effects.protocol import Outcome
from rc.events.journal import Record
from rc.events.memory import MemoryStore

T = TypeVar("T")


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What of an engine outlives a controller."""

    boot: int
    label: str
    paused: bool
    updating: bool
    content: str

    @classmethod
    def of(cls, engine: FakeEngine) -> EngineSnapshot:
        return cls(
            boot=engine.boot,
            label=engine.label,
            paused=engine.paused,
            updating=engine.updating,
            content=engine.content,
        )

    def engine(self) -> FakeEngine:
        """An engine in this state."""
        engine = FakeEngine()
        engine.boot, engine.label, engine.paused = self.boot, self.label, self.paused
        engine.updating, engine.content = self.updating, self.content
        return engine


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the journal there is, and what the engine is."""

    seq: int
    engine: EngineSnapshot


class _NotedList(list[Record]):
    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__()
        self._note = note

    def extend(self, records: Iterable[Record]) -> None:
        super().extend(records)
        self._note()


class TracedEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.note: Callable[[], None] = lambda: None

    async def _call(self, call: str, effect: Callable[[], T]) -> Outcome[T]:
        def noted() -> T:
            value = effect()
            self.note()
            return value

        return await super()._call(call, noted)

    def restart(self) -> None:
        super().restart()
        self.note()


class TracedStore(MemoryStore):
    """A store that notes what the engine is each time that either changes."""

    def __init__(self, engine: TracedEngine) -> None:
        super().__init__()
        self._engine = engine
        self.points: list[CrashPoint] = []
        self.records = _NotedList(self.note)
        engine.note = self.note
        self.note()

    def note(self) -> None:
        point = CrashPoint(seq=len(self.records), engine=EngineSnapshot.of(self._engine))
        if point not in self.points:
            self.points.append(point)


def copy_of(records: list[Record], seq: int) -> MemoryStore:
    """A store that ends where the crash cut it."""
    store = MemoryStore()
    store.records = list(records[:seq])
    store.epoch = max((record.epoch for record in store.records), default=0)
    return store


def whole_decisions(records: list[Record]) -> frozenset[int]:
    """The lengths at which no decision is cut in two: a journal never ends elsewhere."""
    firsts = {record.cause for record in records}
    return frozenset({seq - 1 for seq in firsts} | {len(records)})


__all__ = ("CrashPoint", "EngineSnapshot", "TracedEngine", "TracedStore", "copy_of", "whole_decisions")
