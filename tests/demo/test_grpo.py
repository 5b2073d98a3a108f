"""One GRPO step: its gradient, its masks, its clip, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rc.demo.grpo import Completion, Group, GrpoTrainer, InvalidGroup, NonFiniteStep, group_advantages
from tests.demo.micro import completion, gradient, groups_of, micro_model, micro_trainer, same, weights


def reference_gradient(model: PreTrainedModel, groups: Sequence[Group], clip: float) -> dict[str, Tensor]:
    """Compute the loss token by token, one unpadded completion at a time, as the formula in `rc.demo.grpo` reads."""
    terms = []
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.completions], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / rewards.std(unbiased=False)
        for sample, advantage in zip(group.completions, advantages.tolist(), strict=True):
            logits = model(input_ids=torch.tensor([[*group.prompt_ids, *sample.token_ids]])).logits[0]
            for index, (token, behaviour) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
                position = len(group.prompt_ids) + index - 1
                ratio = torch.exp(torch.log_softmax(logits[position], dim=-1)[token] - behaviour)
                now = float(ratio.detach())
                clipped = min(max(now, 1 - clip), 1 + clip)
                unclipped_is_less = now * advantage <= clipped * advantage
                terms.append(ratio * advantage if unclipped_is_less else torch.tensor(clipped * advantage))
    (-torch.stack(terms).mean()).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def test_advantages_are_distances_from_the_groups_mean_in_standard_deviations() -> None:
    assert group_advantages([0.0, 1.0, 1.0, 2.0]) == pytest.approx([-math.sqrt(2), 0.0, 0.0, math.sqrt(2)])
    assert group_advantages([0.3, 0.3, 0.3]) == [0.0, 0.0, 0.0]
    assert group_advantages([0.1 + 0.2, 0.3]) == [0.0, 0.0]


@pytest.mark.parametrize("off", [0.0, 0.15, 0.3, -0.3])
@pytest.mark.parametrize("tokens_per_pass", [1, 14, 4096])
def test_the_gradient_equals_a_hand_written_reference(off: float, tokens_per_pass: int) -> None:
    trainer = micro_trainer(tokens_per_pass=tokens_per_pass)
    groups = groups_of(trainer, off)
    expected = reference_gradient(micro_model(), groups, clip=0.2)
    report = trainer.step(groups)
    found = gradient(trainer)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    norm = math.sqrt(sum(float(value.square().sum()) for value in expected.values()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert report.tokens == 17


def test_a_group_of_equal_rewards_adds_nothing() -> None:
    with_it, without_it = micro_trainer(), micro_trainer()
    groups = groups_of(with_it)
    flat = Group(prompt_ids=[5, 5], completions=[completion(with_it, [5, 5], [6, 7], 0.4)] * 3)
    report = with_it.step([flat, *groups])
    without_it.step(groups)
    assert same(gradient(with_it), gradient(without_it))
    assert (report.groups, report.tokens) == (2, 17)
    assert report.reward_mean == pytest.approx((3 * 0.4 + 1.25 + 2.5) / 9)


def test_a_step_without_signal_leaves_the_weights_as_they_are() -> None:
    trainer = micro_trainer()
    before = weights(trainer)
    report = trainer.step([Group(prompt_ids=[1], completions=[completion(trainer, [1], [2], 1.0)] * 2)])
    assert same(weights(trainer), before)
    assert (report.step, report.groups, report.grad_norm, report.loss) == (1, 0, 0.0, 0.0)


def _pair(trainer: GrpoTrainer, good_off: float, bad_off: float) -> list[Group]:
    samples = [completion(trainer, [1, 2], [3], 1.0, good_off), completion(trainer, [1, 2], [4], 0.0, bad_off)]
    return [Group(prompt_ids=[1, 2], completions=samples)]


def test_a_token_that_moved_far_enough_in_its_own_direction_no_longer_pulls() -> None:
    trainer = micro_trainer()
    before = weights(trainer)
    report = trainer.step(_pair(trainer, good_off=0.5, bad_off=-0.5))
    assert report.clip_fraction == 1.0
    assert report.grad_norm == 0.0
    assert same(weights(trainer), before)


def test_a_token_that_moved_in_the_wrong_direction_is_still_pulled_back() -> None:
    trainer = micro_trainer()
    report = trainer.step(_pair(trainer, good_off=-0.5, bad_off=0.5))
    assert report.clip_fraction == 1.0
    assert report.grad_norm > 0.1


def test_a_step_raises_the_better_completion_and_lowers_the_worse() -> None:
    trainer = micro_trainer()
    good, bad = trainer.logprobs([1, 2], [3])[0], trainer.logprobs([1, 2], [4])[0]
    trainer.step(_pair(trainer, 0.0, 0.0))
    assert trainer.logprobs([1, 2], [3])[0] > good
    assert trainer.logprobs([1, 2], [4])[0] < bad


def test_a_long_gradient_is_scaled_to_the_norm() -> None:
    trainer = micro_trainer(max_grad_norm=0.01)
    report = trainer.step(groups_of(trainer))
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradient(trainer).values()))
    assert report.grad_norm > 0.01
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_the_report_measures_how_far_engine_and_trainer_disagree() -> None:
    trainer = micro_trainer()
    agreeing = trainer.step(groups_of(trainer))
    assert agreeing.logprob_gap_max < 1e-5
    assert agreeing.ratio_mean == pytest.approx(1.0, abs=1e-5)
    off = micro_trainer().step(groups_of(micro_trainer(), off=0.1))
    assert off.logprob_gap_mean == pytest.approx(0.1, abs=1e-4)
    assert off.ratio_mean == pytest.approx(math.exp(0.1), abs=1e-4)
    assert off.behaviour_kl == pytest.approx(math.exp(0.1) - 1.1, abs=1e-5)


def test_logprobs_are_taken_at_the_sampling_temperature() -> None:
    trainer = micro_trainer(temperature=2.0)
    with torch.no_grad():
        logits = micro_model()(input_ids=torch.tensor([[1, 2, 3]])).logits[0]
    assert trainer.logprobs([1, 2], [3]) == pytest.approx(
        [float(torch.log_softmax(logits[1] / 2.0, dim=-1)[3])], abs=1e-5
    )


def test_the_forward_pass_uses_exactly_what_is_published() -> None:
    trainer = micro_trainer(serve_dtype=torch.bfloat16)
    for _ in range(2):
        published = dict(trainer.published.named_parameters())
        assert {value.dtype for value in published.values()} == {torch.bfloat16}
        assert all(torch.equal(value, published[name].float()) for name, value in trainer.model.named_parameters())
        trainer.step(groups_of(trainer))


def test_steps_too_small_for_the_served_dtype_add_up_in_the_masters() -> None:
    trainer = micro_trainer(serve_dtype=torch.bfloat16, learning_rate=1e-6)
    before, masters = weights(trainer), {name: value.clone() for name, value in trainer.state().items()}
    trainer.step(groups_of(trainer))
    head = "model.norm.weight"  # ones: bfloat16's neighbours are 0.004 and 0.008 away
    assert torch.equal(weights(trainer)[head], before[head])
    assert not torch.equal(trainer.state()[f"master/{head}"], masters[f"master/{head}"])


def test_a_step_gives_the_same_bytes_each_time() -> None:
    first, second = micro_trainer(), micro_trainer()
    for trainer in (first, second):
        for _ in range(3):
            trainer.step(groups_of(trainer))
    assert same(first.state(), second.state())


def test_a_loss_that_is_not_finite_is_an_error_and_changes_nothing() -> None:
    trainer = micro_trainer()
    groups = groups_of(trainer)
    trainer.step(groups)
    before = {name: value.clone() for name, value in trainer.state().items()}
    norm = trainer.model.get_parameter("model.norm.weight")
    with torch.no_grad():
        intact = norm.clone()
        norm[0] = math.nan
    with pytest.raises(NonFiniteStep, match=r"step 2: the loss is nan; the update was not applied"):
        trainer.step(groups)
    assert same(trainer.state(), before)
    assert trainer.steps_done == 1
    with torch.no_grad():
        norm.copy_(intact)
    assert math.isfinite(trainer.step(groups).grad_norm)


@pytest.mark.parametrize(
    ("prompt", "tokens", "logprobs", "reward", "problem"),
    [
        ([], [1], [-1.0], 1.0, "a prompt of at least one token"),
        ([1], [], [], 1.0, "no token"),
        ([1], [1, 2], [-1.0], 1.0, "2 tokens but 1 logprobs"),
        ([1], [1], [math.nan], 1.0, "a logprob is"),
        ([1], [1], [0.5], 1.0, "a logprob is"),
        ([1], [1], [-9999.0], 1.0, "a logprob is"),
        ([1], [1], [-1.0], math.nan, "its reward is nan"),
    ],
)
def test_a_group_that_cannot_be_learned_from_is_refused(
    prompt: list[int], tokens: list[int], logprobs: list[float], reward: float, problem: str
) -> None:
    trainer = micro_trainer()
    samples = [Completion(token_ids=tokens, logprobs=logprobs, reward=reward)]
    with pytest.raises(InvalidGroup, match=problem):
        trainer.step([Group(prompt_ids=prompt, completions=samples)])
    assert trainer.steps_done == 0
