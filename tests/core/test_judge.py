"""What each report must show: in every phase, every way in which evidence can fall short."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from rc.errors import IllegalTransition
from rc.events import types as events
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
from tests.core.scenario import FLIGHT, Core, healthy, kinds, serving, showing, updating

WRONG: dict[str, dict[str, object]] = {
    "boot unknown": {"boot": None, "problem": "timed out"},
    "label unknown": {"label": None, "problem": "timed out"},
    "pause unknown": {"paused": None, "problem": "timed out"},
    "nothing known": {"boot": None, "label": None, "paused": None},
    "another process": {"boot": "e-2"},
    "another label": {"label": "rc-9"},
}
"""Ways in which an observation can be wrong, whatever it should be."""


def good_report(core: Core) -> Evidence:
    """What a healthy engine shows after the effect that is called for."""
    (effect,) = core.effects
    return healthy(effect, core.state)


PROVEN = {
    Phase.DRAINING: ["quiesced"],
    Phase.QUIESCED: ["begin_update"],
    Phase.UPDATING: ["installed"],
    Phase.INVALIDATING: ["invalidated"],
    Phase.VALIDATING: ["validated"],
    Phase.RESUMING: ["resumed", "committed"],
}


@pytest.mark.parametrize("phase", FLIGHT)
def test_a_good_report_takes_the_step(phase: Phase) -> None:
    core = updating(phase)
    assert kinds(core.report(good_report(core))) == PROVEN[phase]


BEFORE_MUTATION = {
    "boot unknown": ["update_abandoned"],
    "label unknown": ["update_abandoned"],
    "pause unknown": ["update_abandoned"],
    "nothing known": ["update_abandoned"],
    "another process": ["update_abandoned", "engine_lost"],
    "another label": ["tainted"],
    "not paused": ["update_abandoned"],
}


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
@pytest.mark.parametrize(("wrong", "expected"), BEFORE_MUTATION.items())
def test_before_mutation_bad_evidence_gives_the_update_up(phase: Phase, wrong: str, expected: list[str]) -> None:
    core = updating(phase)
    bad = showing(good_report(core), **(WRONG | {"not paused": {"paused": False}})[wrong])
    assert kinds(core.report(bad)) == expected
    assert core.state.update is None
    assert core.state.published is not None
    assert core.state.published.version == 0


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
def test_before_mutation_a_problem_gives_the_update_up_whatever_the_engine_shows(phase: Phase) -> None:
    core = updating(phase)
    bad = msgspec.structs.replace(good_report(core), problem="HTTP 500")
    (abandoned,) = core.report(bad)
    assert isinstance(abandoned, events.UpdateAbandoned)
    assert "HTTP 500" in abandoned.reason
    assert abandoned.evidence == bad
    core.settle()
    assert core.phase() is Phase.READY


@pytest.mark.parametrize("phase", [Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING, Phase.RESUMING])
@pytest.mark.parametrize("wrong", [*WRONG, "other pause state"])
def test_after_mutation_began_bad_evidence_taints(phase: Phase, wrong: str) -> None:
    core = updating(phase)
    good = good_report(core)
    bad = showing(good, **(WRONG | {"other pause state": {"paused": not good.observed.paused}})[wrong])
    (tainted,) = core.report(bad)
    assert isinstance(tainted, events.Tainted)
    assert tainted.update == "u1"
    assert tainted.evidence == bad
    assert core.phase() is Phase.TAINTED
    assert core.state.update is None
    assert core.state.next_version == 2
    assert core.state.published is not None
    assert core.state.published.version == 0


@pytest.mark.parametrize("phase", [Phase.INVALIDATING, Phase.VALIDATING])
def test_while_caches_and_checks_are_due_a_problem_taints_whatever_the_engine_shows(phase: Phase) -> None:
    core = updating(phase)
    (tainted,) = core.report(msgspec.structs.replace(good_report(core), problem="HTTP 500"))
    assert isinstance(tainted, events.Tainted)
    assert tainted.reason.endswith(": HTTP 500")


REASONS = {
    "boot unknown": "could not be read: timed out",
    "label unknown": "could not be read: timed out",
    "pause unknown": "could not be read: timed out",
    "nothing known": "could not be read: no reason given",
    "another process": "is another server process than before",
    "another label": "attests 'rc-9', not 'rc-1'",
    "not paused": "is not paused",
}


@pytest.mark.parametrize("checks", [("label",), ()])
@pytest.mark.parametrize(("wrong", "reason"), REASONS.items())
def test_a_taint_says_what_the_engine_showed(wrong: str, reason: str, checks: tuple[str, ...]) -> None:
    core = updating(Phase.VALIDATING)
    shown = showing(good_report(core), **(WRONG | {"not paused": {"paused": False}})[wrong])
    core.report(msgspec.structs.replace(shown, checks=checks))
    assert core.engine.taint == f"validation: {reason}"


def test_a_taint_says_that_a_resume_left_the_engine_paused() -> None:
    core = updating(Phase.RESUMING)
    core.report(showing(good_report(core), paused=True))
    assert core.engine.taint == "resume: is paused"


# ---------------------------------------------------------------------------------------------------------- installing


def install(core: Core, **fields: object) -> list[str]:
    """Report an attempt to install that left the engine paused at its old label, but for ``fields``."""
    observed = Observation(boot="e-1", label="rc-0", paused=True)
    report = InstallReport(observed=observed, mutation="possible")
    return kinds(core.report(msgspec.structs.replace(report, **fields)))


TARGET = Observation(boot="e-1", label="rc-1", paused=True)


def test_an_install_that_was_never_sent_gives_the_update_up() -> None:
    core = updating(Phase.UPDATING)
    assert install(core, mutation="none", problem="refused: no transfer group") == ["update_abandoned"]
    assert (core.engine.version, core.engine.label) == (0, "rc-0")
    core.settle()
    assert core.phase() is Phase.READY
    assert core.state.next_version == 1


@pytest.mark.parametrize("observed", [
    Observation(boot="e-1", label="rc-0", paused=False),
    Observation(boot="e-1", label=None, paused=True),
    Observation(boot="e-2", label="default", paused=False),
    Observation(problem="timed out"),
])  # fmt: skip
def test_an_install_that_was_never_sent_still_needs_an_untouched_engine(observed: Observation) -> None:
    assert install(updating(Phase.UPDATING), mutation="none", observed=observed) == ["tainted"]


def test_an_engine_at_the_target_that_was_sent_nothing_was_changed_by_somebody_else() -> None:
    core = updating(Phase.UPDATING)
    assert install(core, mutation="none", observed=TARGET) == ["tainted"]
    assert core.engine.taint is not None
    assert core.engine.taint.startswith("nothing was sent, but it attests 'rc-1'")


@pytest.mark.parametrize("mutation", ["possible", "complete"])
def test_an_install_that_left_the_old_label_taints(mutation: str) -> None:
    assert install(updating(Phase.UPDATING), mutation=mutation) == ["tainted"]


@pytest.mark.parametrize("problem", [None, "outcome unknown: no answer in 60 s"])
def test_an_install_whose_answer_was_lost_holds_where_the_engine_attests_the_target(problem: str | None) -> None:
    core = updating(Phase.UPDATING)
    assert install(core, mutation="possible", problem=problem, observed=TARGET) == ["installed"]
    assert core.engine.label == "rc-1"
    assert core.engine.version is None, "not before validation"


# --------------------------------------------------------------------------------------------------- caches and checks


@pytest.mark.parametrize(
    "flags", list(itertools.product([True, False], [True, False], [True, False], [None, True, False]))
)
def test_every_cache_that_the_engine_has_must_have_been_reset(flags: tuple[bool, bool, bool, bool | None]) -> None:
    core = updating(Phase.INVALIDATING)
    prefix, multimodal, encoder, connector = flags
    report = CacheReport(observed=TARGET, prefix=prefix, multimodal=multimodal, encoder=encoder, connector=connector)
    complete = prefix and multimodal and encoder and connector in (None, True)
    assert kinds(core.report(report)) == (["invalidated"] if complete else ["tainted"])


def test_a_validation_without_a_check_is_not_a_pass() -> None:
    core = updating(Phase.VALIDATING)
    (tainted,) = core.report(ValidationReport(observed=TARGET))
    assert isinstance(tainted, events.Tainted)
    assert tainted.reason == "validation: no check was made"


def test_a_version_is_held_only_once_it_is_validated() -> None:
    core = updating(Phase.VALIDATING)
    assert (core.engine.version, core.engine.base) == (None, 0)
    core.step()
    assert (core.engine.version, core.engine.base) == (1, None)
    assert core.state.published is not None
    assert core.state.published.version == 0, "not before it has resumed"


# ------------------------------------------------------------------------------------------------------------ resuming


def test_a_resume_counts_by_what_the_engine_shows() -> None:
    core = updating(Phase.RESUMING)
    report = msgspec.structs.replace(good_report(core), problem="outcome unknown: no answer in 30 s")
    assert kinds(core.report(report)) == ["resumed", "committed"]


AFTER_ABANDONING = {
    "boot unknown": ["engine_lost"],
    "label unknown": ["engine_lost"],
    "pause unknown": ["engine_lost"],
    "nothing known": ["engine_lost"],
    "another process": ["engine_lost"],
    "another label": ["tainted"],
    "still paused": ["engine_lost"],
    "a fresh process": ["engine_lost"],
}


@pytest.mark.parametrize(("wrong", "expected"), AFTER_ABANDONING.items())
def test_an_engine_that_does_not_resume_from_an_abandoned_update_is_lost_or_tainted(
    wrong: str, expected: list[str]
) -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    more: dict[str, dict[str, object]] = {
        "still paused": {"paused": True},
        "a fresh process": {"boot": "e-2", "label": "default"},
    }
    bad = showing(good_report(core), **(WRONG | more)[wrong])
    assert kinds(core.report(bad)) == expected
    assert core.phase() in (Phase.ABSENT, Phase.TAINTED)


def test_an_engine_that_resumed_from_an_abandoned_update_commits_nothing() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    (resumed,) = core.report(good_report(core))
    assert isinstance(resumed, events.Resumed)
    assert resumed.update == "u1"
    assert core.engine.update is None


def test_an_adopted_engine_whose_update_was_abandoned_goes_back_to_joined() -> None:
    core = Core()
    core.start()
    core.join()
    core.update("u0", path="adopt")
    core.advance(Phase.QUIESCED)
    core.abandon("u0")
    core.settle()
    assert core.phase() is Phase.JOINED


# -------------------------------------------------------------------------------------------- reports nobody asked for

REPORTS: tuple[Evidence, ...] = (
    LookReport(observed=TARGET),
    PauseReport(observed=TARGET),
    PreflightReport(observed=TARGET),
    InstallReport(observed=TARGET, mutation="complete"),
    CacheReport(observed=TARGET, prefix=True, multimodal=True, encoder=True),
    ValidationReport(observed=TARGET, checks=("label",)),
    ResumeReport(observed=TARGET),
)
CALLED_FOR = {
    Phase.DRAINING: PauseReport,
    Phase.QUIESCED: PreflightReport,
    Phase.UPDATING: InstallReport,
    Phase.INVALIDATING: CacheReport,
    Phase.VALIDATING: ValidationReport,
    Phase.RESUMING: ResumeReport,
}


@pytest.mark.parametrize("phase", list(Phase))
def test_a_report_that_the_phase_does_not_call_for_is_refused(phase: Phase) -> None:
    core = _in(phase)
    for report in REPORTS:
        if isinstance(report, CALLED_FOR.get(phase, ())):
            continue
        with pytest.raises(
            IllegalTransition, match=f"{type(report).__name__} is not allowed while engine e is {phase.name}"
        ):
            core.report(report)
    assert core.phase() is phase


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED, Phase.UPDATING])
def test_in_doubt_only_a_look_counts_where_an_effect_may_not_be_repeated(phase: Phase) -> None:
    core = updating(phase)
    core.start("c2")
    for report in REPORTS[1:]:
        with pytest.raises(IllegalTransition, match=f"{phase.name} and in doubt"):
            core.report(report)


def _in(phase: Phase) -> Core:
    match phase:
        case Phase.ABSENT:
            return Core()
        case Phase.JOINED:
            core = Core()
            core.join()
            return core
        case Phase.READY:
            return serving()
        case Phase.TAINTED:
            core = serving()
            core.join(boot="e-1", label="rc-9")
            return core
        case _:
            return updating(phase)
