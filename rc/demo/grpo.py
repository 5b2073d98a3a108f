"""Group-relative policy gradient (GRPO): one step from sampled completions to new weights.

For every prompt the engine samples a *group* of completions. A completion's advantage is its reward's distance from its
group's mean in standard deviations; no value model is needed. Each token then contributes PPO's clipped surrogate

    min(ratio · A, clip(ratio, 1 - clip, 1 + clip) · A),     ratio = π_trainer(token) / π_engine(token),

averaged over all tokens of the step, where π_engine is the *behaviour* probability that the engine reported with the
sample. A group whose rewards are all equal says nothing about direction: it is left out, of the average too.

Three copies of the weights, and why. The optimizer moves float32 *masters*, because a step is often smaller than
bfloat16 can express. After each update they are rounded to the dtype that is served: that is `GrpoTrainer.published`,
the bytes that the engine is sent. The forward pass here runs in float32 on exactly those rounded values (on CPUs
without bfloat16 arithmetic it is about twenty times slower in bfloat16), so the trainer's logprobs differ from the
engine's only by the engine's rounding of activations.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rc.demo.padding import PaddedRows, Row, pad, padded_batches
from rc.errors import CallerError, RolloutCoreError

__all__ = (
    "MASTER",
    "Completion",
    "Group",
    "GrpoTrainer",
    "InvalidGroup",
    "NonFiniteStep",
    "StepReport",
    "group_advantages",
)

MASTER = "master"
"""Prefix of the masters' names in `GrpoTrainer.state`; other prefixes are the optimizer's."""

# Below this the spread of a group's rewards is rounding, not signal.
_MIN_REWARD_STD = 1e-6

# vLLM reports this for a logprob that is NaN or minus infinity.
_ENGINE_NO_LOGPROB = -9999.0

# The second moment forgets within about 20 updates: a demo makes few, and its gradients change as the policy learns.
_ADAM_BETAS = (0.9, 0.95)


class InvalidGroup(CallerError):
    """A group that cannot be learned from: empty, lengths that do not match, or a logprob or reward out of range."""


class NonFiniteStep(RolloutCoreError):
    """Loss or gradient became NaN or infinite. That update was not applied: weights and optimizer are as before it."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(
            f"step {step}: the {what} is {value}; the update was not applied. Lower the learning rate, or look at the "
            f"rewards and logprobs of this step's groups"
        )
        self.step = step
        self.what = what
        self.value = value


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled completion.

    Attributes:
        token_ids: The sampled tokens, without the prompt.
        logprobs: The engine's natural-log probability of each token, after temperature (vLLM's
            ``--logprobs-mode processed_logprobs``).
        reward: Its score; only differences within a group matter.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the completions sampled from it."""

    prompt_ids: Sequence[int]
    completions: Sequence[Completion]

    def check(self) -> None:
        """Raise `InvalidGroup` where this group cannot be learned from."""
        if not self.prompt_ids or not self.completions:
            raise InvalidGroup("a group needs a prompt of at least one token and at least one completion")
        for number, completion in enumerate(self.completions):
            problem = _problem(completion)
            if problem is not None:
                raise InvalidGroup(f"completion {number} of {len(self.completions)}: {problem}")


def _problem(completion: Completion) -> str | None:
    if not completion.token_ids:
        return "it has no token"
    if len(completion.token_ids) != len(completion.logprobs):
        return f"{len(completion.token_ids)} tokens but {len(completion.logprobs)} logprobs"
    if not math.isfinite(completion.reward):
        return f"its reward is {completion.reward}"
    if not all(_ENGINE_NO_LOGPROB < logprob <= 0.0 for logprob in completion.logprobs):
        return "a logprob is positive, NaN, or the engine's -9999 for 'none'"
    return None


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step saw and did.

    The four figures on the ratio compare the trainer with the engine *before* the weights move: with the engine on the
    weights that the trainer published they measure its rounding alone, and anything larger means that the two sides
    disagree about the weights, the sampling temperature or the tokens.

    Attributes:
        step: Number of this step, counted from 1.
        loss: Mean clipped surrogate over tokens, negated, at the first update.
        reward_mean: Mean over all completions of the step.
        reward_std: Standard deviation over all completions of the step.
        ratio_mean: Mean of the importance ratio; 1 where both sides agree.
        logprob_gap_mean: Mean absolute difference of the two sides' logprobs, in nats.
        logprob_gap_max: The largest such difference, in nats.
        behaviour_kl: Estimate of KL(engine ‖ trainer) in nats per token.
        clip_fraction: Share of tokens whose ratio lay outside the clip range at the last update.
        grad_norm: Gradient's L2 norm before clipping, at the last update.
        groups: Groups that carried signal, of all that were given.
        tokens: Completion tokens in those groups.
        seconds: Wall-clock time.
    """

    step: int
    loss: float
    reward_mean: float
    reward_std: float
    ratio_mean: float
    logprob_gap_mean: float
    logprob_gap_max: float
    behaviour_kl: float
    clip_fraction: float
    grad_norm: float
    groups: int
    tokens: int
    seconds: float


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Give each reward's distance from the mean in (population) standard deviations; zeros where all are equal."""
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    if std < _MIN_REWARD_STD:
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


class _Sums:
    """Token sums over the batches of one update, kept in float64."""

    def __init__(self) -> None:
        self.surrogate = self.ratio = self.gap = self.kl = self.clipped = 0.0
        self.gap_max = 0.0

    def add(self, surrogate: Tensor, log_ratio: Tensor, mask: Tensor, clip: float) -> None:
        log_ratio = log_ratio.detach()[mask].double()
        ratio = log_ratio.exp()
        self.surrogate += float(surrogate.detach()[mask].double().sum())
        self.ratio += float(ratio.sum())
        self.gap += float(log_ratio.abs().sum())
        self.gap_max = max(self.gap_max, float(log_ratio.abs().max()))
        self.kl += float((ratio - 1.0 - log_ratio).sum())
        self.clipped += float(((ratio - 1.0).abs() > clip).sum())


class GrpoTrainer:
    """Trains a causal language model in place, one `step` per generation of weights.

    Attributes:
        model: What the forward pass uses: float32 tensors holding the served values exactly.
        published: The weights to serve, in ``serve_dtype``; refreshed at the end of every step, and by `load_state`.
        steps_done: Steps taken so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        clip: float = 0.2,
        temperature: float = 1.0,
        updates_per_step: int = 1,
        max_grad_norm: float = 1.0,
        serve_dtype: torch.dtype = torch.bfloat16,
        tokens_per_pass: int = 4096,
        threads: int | None = None,
    ) -> None:
        """Take over ``model``, whose parameters must be float32; they are rounded to ``serve_dtype`` at once.

        Args:
            model: A causal language model as transformers loads it.
            learning_rate: AdamW's step size.
            clip: How far the importance ratio may leave 1 before a token stops pulling.
            temperature: The sampling temperature that the behaviour logprobs were taken at.
            updates_per_step: Optimizer updates made from one step's samples.
            max_grad_norm: L2 norm that a larger gradient is scaled down to.
            serve_dtype: What the engine serves.
            tokens_per_pass: Padded tokens in one forward pass, prompt included; bounds memory, changes no result.
            threads: Threads that torch may use in `step`, or None to leave that alone.
        """
        if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
            raise CallerError("the trainer needs float32 parameters: load the model with dtype=torch.float32")
        # Not .train(): dropout would make the trainer's probabilities differ from the engine's.
        self.model = model.eval()
        self.published = _cast_parameters(copy.deepcopy(model), serve_dtype)
        self.steps_done = 0
        self._clip = clip
        self._temperature = temperature
        self._updates_per_step = updates_per_step
        self._max_grad_norm = max_grad_norm
        self._tokens_per_pass = tokens_per_pass
        self._threads = threads
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._masters = {name: value.detach().clone() for name, value in model.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=learning_rate, betas=_ADAM_BETAS, weight_decay=0.0
        )
        self._round_to_served()

    def step(self, groups: Sequence[Group]) -> StepReport:
        """Learn from one batch of groups and refresh `published`.

        Deterministic: the same weights, groups and thread count give the same bytes. Where no group carries signal the
        weights stay as they are. Raises `InvalidGroup` and `NonFiniteStep`.
        """
        started = time.perf_counter()
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # OpenMP keeps this per calling thread, so it is set in each step
        for group in groups:
            group.check()
        rows = _rows(groups)
        first = last = _Sums()
        grad_norm = 0.0
        for update in range(self._updates_per_step if rows else 0):
            last, grad_norm = self._update(rows)
            first = last if update == 0 else first
        self.steps_done += 1
        return self._report(groups, rows, first, last, grad_norm, time.perf_counter() - started)

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Give this trainer's own logprob of each completion token, at the sampling temperature."""
        row = Row(
            token_ids=[*prompt_ids, *token_ids],
            prompt_length=len(prompt_ids),
            logprobs=[0.0] * len(token_ids),
            advantage=0.0,
        )
        with torch.no_grad():
            return [float(value) for value in self._logprobs(pad([row]))[0]]

    def state(self) -> dict[str, Tensor]:
        """Give what a later process needs to go on: masters and the optimizer's moments, by ``SLOT/PARAMETER``.

        The tensors are the trainer's own; the next step changes them.
        """
        tensors = {f"{MASTER}/{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            tensors |= {f"{slot}/{name}": value for slot, value in self._optimizer.state[master].items()}
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], *, steps_done: int) -> None:
        """Go on from another trainer's `state`, which must be of the same model; `model` and `published` follow."""
        self._optimizer.state.clear()
        for key, value in tensors.items():
            slot, _, name = key.partition("/")
            if slot == MASTER:
                self._masters[name].copy_(value)
            else:
                self._optimizer.state[self._masters[name]][slot] = value.clone()
        self.steps_done = steps_done
        self._round_to_served()

    def _update(self, rows: Sequence[Row]) -> tuple[_Sums, float]:
        tokens = sum(len(row.logprobs) for row in rows)
        sums = _Sums()
        self.model.zero_grad()
        for batch in padded_batches(rows, tokens_per_batch=self._tokens_per_pass, vocabulary=self._vocabulary):
            surrogate, log_ratio = self._surrogate(batch)
            sums.add(surrogate, log_ratio, batch.mask, self._clip)
            torch.autograd.backward(-(surrogate * batch.mask).sum() / tokens)
        self._check_finite("loss", -sums.surrogate)
        return sums, self._apply_gradient()

    def _surrogate(self, batch: PaddedRows) -> tuple[Tensor, Tensor]:
        # Padding has log ratio 0, so that no padded value can become NaN and leak through a masked product.
        log_ratio = (self._logprobs(batch) - batch.behaviour).masked_fill(~batch.mask, 0.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1.0 - self._clip, 1.0 + self._clip)
        return torch.minimum(ratio * batch.advantages, clipped * batch.advantages), log_ratio

    def _logprobs(self, batch: PaddedRows) -> Tensor:
        kept = batch.input_ids.shape[1] - batch.first
        output = self.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            logits_to_keep=kept + 1,
            use_cache=False,
        )
        # The logits at a position predict the token after it.
        logits = output.logits[:, :-1].float() / self._temperature
        gathered: Tensor = logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        return gathered

    def _apply_gradient(self) -> float:
        for name, parameter in self.model.named_parameters():
            self._masters[name].grad, parameter.grad = parameter.grad, None
        norm = float(nn.utils.clip_grad_norm_(self._masters.values(), self._max_grad_norm))
        self._check_finite("gradient norm", norm)
        self._optimizer.step()
        self._round_to_served()
        return norm

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise NonFiniteStep(self.steps_done + 1, what, value)

    @torch.no_grad()
    def _round_to_served(self) -> None:
        served = dict(self.published.named_parameters())
        for name, parameter in self.model.named_parameters():
            served[name].copy_(self._masters[name])
            parameter.copy_(served[name])

    def _report(
        self, groups: Sequence[Group], rows: Sequence[Row], first: _Sums, last: _Sums, grad_norm: float, seconds: float
    ) -> StepReport:
        rewards = [completion.reward for group in groups for completion in group.completions]
        mean = math.fsum(rewards) / max(1, len(rewards))
        tokens = sum(len(row.logprobs) for row in rows)
        per_token = 1.0 / max(1, tokens)
        return StepReport(
            step=self.steps_done,
            loss=-first.surrogate * per_token,
            reward_mean=mean,
            reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards))),
            ratio_mean=first.ratio * per_token if rows else 1.0,
            logprob_gap_mean=first.gap * per_token,
            logprob_gap_max=first.gap_max,
            behaviour_kl=first.kl * per_token,
            clip_fraction=last.clipped * per_token,
            grad_norm=grad_norm,
            groups=sum(_carries_signal(group) for group in groups),
            tokens=tokens,
            seconds=seconds,
        )


def _carries_signal(group: Group) -> bool:
    return any(group_advantages([completion.reward for completion in group.completions]))


def _rows(groups: Sequence[Group]) -> list[Row]:
    rows = []
    for group in filter(_carries_signal, groups):
        advantages = group_advantages([completion.reward for completion in group.completions])
        for completion, advantage in zip(group.completions, advantages, strict=True):
            rows.append(
                Row(
                    token_ids=[*group.prompt_ids, *completion.token_ids],
                    prompt_length=len(group.prompt_ids),
                    logprobs=completion.logprobs,
                    advantage=advantage,
                )
            )
    return rows


def _cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Cast the parameters alone: buffers such as rotary frequencies are computed in float32 on both sides."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    return model
