"""The demo's training loop: sample from a live engine, learn, publish, and again.

Two kinds of rollout run at once, as in a real deployment: the trainer's own, in lockstep with its steps, and an
evaluation that samples greedily all the time and knows nothing of updates. Every update therefore meets a rollout that
it has to let finish first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.to_thread
import msgspec

from rc.controller import Controller
from rc.demo.checkpoint import save_checkpoint
from rc.demo.grpo import Completion, Group, GrpoTrainer
from rc.demo.policy import Policy
from rc.demo.run_directory import DemoSettings, LearnedStep, RunDirectory
from rc.demo.task import Prompt, prompt_batch, reward, sampling_seed
from rc.errors import EngineError, NotAdmitted, RolloutCoreError, UnknownRollout
from rc.task_group import background_tasks
from rc.update_watch import Commit
from rc.versions import WeightIdentity
from rc.weights import ModuleWeights

__all__ = ("Progress", "StepResult", "run_name", "train")

EVALUATION_TOKENS = 96
"""Long enough that an update usually meets one under way, short enough that it does not wait long for it."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """One training step: what was learned, and the version that carries it."""

    learned: LearnedStep
    commit: Commit


class Progress(Protocol):
    """Who wants to know how the run goes."""

    def sampling(self, step: int, done: int, of: int) -> None:
        """Rollouts of a step that have finished."""
        ...

    def learning(self, step: int) -> None:
        """The trainer computes a step."""
        ...

    def publishing(self, step: int) -> None:
        """The step's weights are being published."""
        ...

    def stepped(self, result: StepResult) -> None:
        """A step is published."""
        ...


async def train(
    control: Controller,
    policy: Policy,
    trainer: GrpoTrainer,
    prompts: Sequence[Prompt],
    settings: DemoSettings,
    directory: RunDirectory,
    progress: Progress,
) -> None:
    """Take the steps that are left, publishing each.

    What a step learned is on disk before its weights are published, so that a run that is killed between the two
    publishes them when it goes on.
    """
    published = control.published
    if published is None or trainer.steps_done > published.identity.step or not control.serving:
        progress.publishing(trainer.steps_done)
        await _publish(control, trainer, settings)
    async with background_tasks() as tasks:
        tasks.start_soon(_evaluate, control, policy, prompts)
        while trainer.steps_done < settings.steps:
            step = trainer.steps_done + 1
            started = anyio.current_time()
            groups = await _sample(control, policy, prompts, settings, step, progress)
            sampling_s = anyio.current_time() - started
            progress.learning(step)
            report = await anyio.to_thread.run_sync(trainer.step, groups)
            learned = LearnedStep.of(report, sampling_s)
            await anyio.to_thread.run_sync(_save, directory, trainer, learned)
            progress.publishing(step)
            commit = await _publish(control, trainer, settings)
            progress.stepped(StepResult(learned=learned, commit=commit))


def _save(directory: RunDirectory, trainer: GrpoTrainer, learned: LearnedStep) -> None:
    directory.append_step(learned)
    save_checkpoint(directory.checkpoint, trainer)


def run_name(settings: DemoSettings) -> str:
    """The training run's name in every weight identity."""
    return f"demo-seed{settings.seed}"


async def _publish(control: Controller, trainer: GrpoTrainer, settings: DemoSettings) -> Commit:
    identity = WeightIdentity(run=run_name(settings), step=trainer.steps_done)
    return await control.update(identity, ModuleWeights(trainer.published))


async def _sample(
    control: Controller,
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: DemoSettings,
    step: int,
    progress: Progress,
) -> list[Group]:
    """Sample a group of completions for each prompt of a step, all at once."""
    count = settings.prompts_per_step
    first = (step - 1) * count
    batch = prompt_batch(prompts, seed=settings.seed, cursor=first, count=count)
    encoded = [policy.encode(prompt.text, max_tokens=settings.max_tokens) for prompt in batch]
    completions: list[list[Completion | None]] = [[None] * settings.completions for _ in batch]
    total, done = count * settings.completions, 0
    progress.sampling(step, done, total)

    async def sample(number: int, sample: int) -> None:
        nonlocal done
        seed = sampling_seed(settings.seed, first + number, sample)
        async with control.rollout() as rollout:
            turn = await rollout.generate(encoded[number], max_tokens=settings.max_tokens, temperature=1.0, seed=seed)
        text = policy.decode(list(turn.token_ids))
        score = reward(batch[number].rule, text, settings.max_tokens)
        completions[number][sample] = Completion(token_ids=turn.token_ids, logprobs=turn.logprobs, reward=score)
        done += 1
        progress.sampling(step, done, total)

    try:
        async with anyio.create_task_group() as tasks:
            for number in range(count):
                for completion in range(settings.completions):
                    tasks.start_soon(sample, number, completion)
    except* RolloutCoreError as group:
        # Where the engine fails, every rollout fails alike: one of them says it all.
        raise _first_of(group) from None
    return [
        Group(prompt_ids=prompt_ids, completions=[completion for completion in row if completion is not None])
        for prompt_ids, row in zip(encoded, completions, strict=True)
    ]


def _first_of(group: BaseExceptionGroup[RolloutCoreError]) -> RolloutCoreError:
    """Give the first error of a group, however deep."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


async def _evaluate(control: Controller, policy: Policy, prompts: Sequence[Prompt]) -> None:
    """Sample greedily, prompt after prompt, for as long as the run lasts."""
    turn = 0
    while True:
        prompt = prompts[turn % len(prompts)]
        token_ids = policy.encode(prompt.text, max_tokens=EVALUATION_TOKENS)
        try:
            async with control.rollout() as rollout:
                await rollout.generate(token_ids, max_tokens=EVALUATION_TOKENS, temperature=0.0)
        except (NotAdmitted, EngineError, UnknownRollout):
            return  # the training loop meets the same error and reports it
        turn += 1
