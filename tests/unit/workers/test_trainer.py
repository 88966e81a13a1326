"""A trainer process's share of a step, with an engine that writes down its batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl import config
from megarl.algorithms.advantages import Moments
from megarl.algorithms.correction import CorrectionFigures
from megarl.config import OptimizerConfig
from megarl.data.packing import PackedBatch
from megarl.engines.megatron import StepResult
from megarl.parallel.topology import RankGrid
from megarl.types import Sample
from megarl.workers import trainer
from megarl.workers.messages import UpdatePlan
from megarl.workers.step_store import StepStore
from megarl.workers.trainer import TrainerWorker, learning_rate_of
from tests.reward_models import write_reward_model


class Engine:
    """A log-prob is the target's token number, an entropy a hundredth of it, a value ten times it."""

    def __init__(self, results: list[StepResult]) -> None:
        self.results, self.steps = results, []

    def forward(self, batches: list[PackedBatch], **options: Any) -> list[dict[str, np.ndarray]]:
        self.options = options
        found = []
        for batch in batches:
            tokens = batch.targets.astype(np.float32)
            extra = {"entropy": tokens / 100} if options["with_entropy"] else {}
            found.append({"logprobs": tokens, "values": tokens * 10, **extra})
        return found

    def train_step(self, batches: list[PackedBatch], objective: Any, *, lr: float, **options: Any) -> StepResult:
        self.steps.append((batches, lr, options))
        return self.results[len(self.steps) - 1]


def sample(index: int, mask: list[bool]) -> Sample:
    length = len(mask)
    return Sample(
        uid=f"u{index}",
        group="g",
        prompt_ids=np.array([1]),
        response_ids=np.arange(length) + 10 * (index + 1),
        rollout_logprobs=np.arange(length, dtype=np.float32) + 10 * (index + 1),
        loss_mask=np.array(mask),
        weight_versions=np.zeros(length, np.int64),
        score=float(index),
        finish_reason="stop",
        data_source="s",
    )


MASKS = [[True, True], [True, False, True], [True], [True, True, True, True]]


@pytest.fixture(autouse=True)
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is the thing itself."""
    monkeypatch.setattr(trainer.ray, "put", lambda value: value)
    monkeypatch.setattr(trainer.ray, "get", lambda refs: refs)


def worker(
    rank: int = 0, results: list[StepResult] | None = None, num_ranks: int = 1, **sections: Any
) -> TrainerWorker:
    """A rank of two data-parallel ranks, holding samples 0 to 3. It asks others only if num_ranks is above 1."""
    made = TrainerWorker()
    made.config = config.build(
        {"model": {"create": {}}, "data": {"create": {}}, "cluster": {"gpus_per_node": 2}, **sections}
    )
    made.rank, made.skipped_in_a_row = rank, {}
    made.num_ranks = num_ranks
    engine = Engine(results or [])
    made.engines = dict.fromkeys(made.config.roles(), engine)  # type: ignore[misc]
    made.grids = {role: RankGrid(2, parallel) for role, parallel in made.config.roles().items()}
    made.store = StepStore()
    made.store.samples = {i: sample(i, mask) for i, mask in enumerate(MASKS)}
    return made


def test_forward_keeps_each_samples_values_and_sums_over_loss_tokens() -> None:
    made = worker()
    result = made.forward("actor", [[2, 1], [], [0]])
    assert {i: v.tolist() for i, v in result.values.items()} == {0: [10, 11], 1: [20, 21, 22], 2: [30]}
    assert [v.tolist() for v in made.store.get("old_logprobs", [0, 1, 2])] == [[10, 11], [20, 21, 22], [30]]
    assert result.entropy is not None
    assert (result.entropy.count, result.entropy.total) == (5, pytest.approx(0.1 + 0.11 + 0.2 + 0.22 + 0.3))
    assert result.logprob_difference is not None
    assert (result.logprob_difference.count, result.logprob_difference.max) == (5, 0.0)
    values = made.forward("critic", [[1]])
    assert values.stats is not None
    assert (values.stats.count, values.stats.total) == (2, 200.0 + 220.0)
    assert [v.tolist() for v in made.store.get("values", [1])] == [[200, 210, 220]]


def test_ranks_that_repeat_anothers_output_send_nothing() -> None:
    """Tensor rank 1 has the values that rank 0 sends."""
    made = worker(1, actor={"parallel": {"tensor": 2}})
    assert made.forward("actor", [[0]]).values is None
    assert [v.tolist() for v in made.store.get("old_logprobs", [0])] == [[10, 11]]


def test_only_what_is_missing_is_received() -> None:
    made = worker()
    made.store.put("values", {0: np.array([7.0])})
    made.receive("values", [0, 1], [{0: np.array([8.0]), 3: np.array([9.0])}, {1: np.array([5.0])}])
    assert {i: v.tolist() for i, v in made.store.all("values").items()} == {0: [7.0], 1: [5.0]}
    made.receive("values", [0, 1], [None])  # all are here: nothing is looked at


class ValueEngine(Engine):
    """A value is the token's number, a half more for each position."""

    def forward(self, batches: list[PackedBatch], **options: Any) -> list[dict[str, np.ndarray]]:
        self.batches = batches
        return [{"values": (batch.tokens + batch.positions / 2).astype(np.float32)} for batch in batches]


def scoring_worker(folder: Path, **own: Any) -> TrainerWorker:
    """Its reward model reads each answer's first token, once more than the answer has tokens."""
    scoring = {"path": str(write_reward_model(folder)), "max_length": 100, **own}
    made = worker(reward_model=scoring)
    made.engines["reward_model"] = ValueEngine([])  # type: ignore[assignment]

    def read(samples: Any) -> tuple[list[np.ndarray], int]:
        return [np.repeat(s.response_ids[:1], len(s.response_ids) + 1) for s in samples], len(samples)

    made.reward_tokens = read  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("parallel", [{}, {"context": 2}])
def test_a_score_is_the_value_at_the_last_token(parallel: dict[str, int], tmp_path: Path) -> None:
    """Samples 0, 1 and 2 have 3, 4 and 2 tokens: 10, 20 and 30, the last at positions 2, 3 and 1. Padding (to 4 with
    context 2) does not count, and a micro-batch may be empty."""
    made = scoring_worker(tmp_path, parallel=parallel)
    read = made.retokenise([0, 2, 1])
    assert (read.lengths, read.num_truncated) == ([3, 2, 4], 3)
    assert made.score([[2, 1], [], [0]]) == {0: 11.0, 1: 21.5, 2: 30.5}
    (batch, _, _) = made.engines["reward_model"].batches  # type: ignore[attr-defined]
    assert batch.cu_seqlens.tolist() == ([0, 4, 8] if parallel else [0, 2, 6])


def test_advantages_are_computed_from_the_new_scores(tmp_path: Path) -> None:
    made = scoring_worker(tmp_path)
    made.forward("actor", [[0, 1]])
    made.store.put("values", {i: np.zeros(len(MASKS[i]), np.float32) for i in (0, 1)})
    made.rescore([0, 1], [2.5, -3.0])
    assert [made.store.samples[i].score for i in range(4)] == [2.5, -3.0, 2.0, 3.0]
    result = made.advantages([0, 1], 0.0, None)
    assert (result.rewards.total, result.rewards.max) == (-0.5, 2.5)


def test_rewards_become_advantages_and_returns() -> None:
    """gamma = lam = 1: a return is the score; an advantage is the score less the value."""
    made = worker()
    indices = [0, 1]
    made.forward("actor", [indices])
    made.store.put("values", {0: np.array([0.5, 0.5], np.float32), 1: np.array([0.25, 9.0, 0.75], np.float32)})
    result = made.advantages(indices, 0.0, None)
    assert result.moments == Moments(4, -0.5 - 0.5 + 0.75 + 0.25, 0.25 + 0.25 + 0.5625 + 0.0625)
    assert (result.rewards.total, result.kl.count) == (1.0, 0)
    finished = made.whiten(indices, Moments(4, 2.0, 4.0))  # mean 0.5, variance 1
    np.testing.assert_allclose(made.store.get("advantages", [1])[0], [0.25, 0.0, -0.25], atol=1e-6)
    assert {i: v.tolist() for i, v in finished.returns_ref.items()} == {0: [0.0, 0.0], 1: [1.0, 0.0, 1.0]}
    assert finished.return_moments == Moments(4, 2.0, 2.0)
    assert finished.residuals == Moments(4, 0.0, 1.125)
    assert finished.advantages.total == pytest.approx(-2.0)


def test_without_a_critic_group_advantages_are_left_as_they_are() -> None:
    made = worker(algorithm={"advantage": "grpo"}, rollout={"n": 2})
    made.forward("actor", [[1, 3]])
    made.advantages([1, 3], 0.0, [0.5, -0.5])
    finished = made.whiten([1, 3], None)
    assert (finished.advantages.count, finished.advantages.total, finished.returns_ref) == (6, 1.0 - 2.0, None)
    assert [v.tolist() for v in made.store.get("advantages", [1, 3])] == [[0.5, 0.0, 0.5], [-0.5] * 4]


@pytest.mark.parametrize(
    ("aggregation", "tokens", "expected"),
    [
        ("token-mean", 9, 1.0),
        ("seq-mean-token-sum", 9, 9 / 4),  # the sum of a loss of 1 over 9 tokens in 4 sequences
        ("seq-mean-token-mean", 9, 1.0),
        ("constant", 9, 9 / 50),
    ],
)
def test_loss_weights_of_all_ranks_add_up_to_the_aggregate(aggregation: str, tokens: int, expected: float) -> None:
    """Of a loss that is 1 at every loss token; rank 0 has samples 0 and 1, rank 1 has 2 and 3."""
    loss = count = 0.0
    for rank, own in ((0, [[0], [1]]), (1, [[2, 3], []])):
        made = worker(
            rank,
            [StepResult({}, 1.0, True)],
            actor={"aggregation": aggregation, "aggregation_constant": 50.0},
        )
        for name in ("old_logprobs", "advantages"):
            made.store.put(name, {i: np.zeros(len(mask), np.float32) for i, mask in enumerate(MASKS)})
        made.update("actor", UpdatePlan([own], [(tokens, 4)], 0, 1))
        ((batches, _, _),) = made.engines["actor"].steps  # type: ignore[attr-defined]
        loss += sum(float(batch.per_token["loss_weight"][batch.mask].sum()) for batch in batches)
        count += sum(float(batch.per_token["token_weight"][batch.mask].sum()) for batch in batches)
    assert loss == pytest.approx(expected)
    assert count == pytest.approx(1.0)


def test_an_update_goes_through_epochs_and_mini_batches_with_its_learning_rates() -> None:
    """Two epochs of two mini-batches from optimizer step 1 of 8, warming up over 4 steps: lr x 2/4, 3/4, 4/4, 1."""
    results = [StepResult({"critic/vf_loss": float(i)}, 10.0 * i, i != 2) for i in range(4)]
    made = worker(
        results=results,
        critic={"optimizer": {"lr": 1.0, "warmup_steps": 4}, "batch": {"epochs": 2}},
        rollout={"temperature": 0.5},
    )
    for name, shift in (("values", 0), ("returns", 10)):
        made.store.put(name, {i: np.full(len(mask), i + shift, np.float32) for i, mask in enumerate(MASKS)})
    metrics = made.update("critic", UpdatePlan([[[0], [1]], [[3, 2]]], [(4, 2), (5, 2)], 1, 8))
    steps = made.engines["critic"].steps  # type: ignore[attr-defined]
    assert [[batch.num_sequences for batch in batches] for batches, _, _ in steps] == [[1, 1], [2]] * 2
    assert [lr for _, lr, _ in steps] == [0.5, 0.75, 1.0, 1.0]
    assert steps[0][2] == {"temperature": 0.5, "with_entropy": False}
    assert steps[1][0][0].per_token["old_values"][:4].tolist() == [3.0] * 4
    assert steps[1][0][0].per_token["returns"][:4].tolist() == [13.0] * 4
    assert metrics == {
        "critic/vf_loss": 1.5,
        "critic/grad_norm": 15.0,
        "critic/lr": 0.8125,
        "critic/skipped_updates": 1.0,
    }


def test_a_run_shorter_than_its_warm_up_still_has_a_learning_rate() -> None:
    options = OptimizerConfig(lr=1.0, schedule="cosine", warmup_steps=10)
    assert [learning_rate_of(options, step, total_steps=2) for step in (0, 1)] == [0.1, 0.2]


def test_updates_skipped_in_a_row_stop_the_run_and_one_applied_between_starts_the_count_anew() -> None:
    applied = [False, True, False, False]
    results = [StepResult({}, 1.0 if ok else float("nan"), ok) for ok in applied]
    made = worker(results=results, run={"max_skipped_updates": 2}, algorithm={"advantage": "grpo"}, rollout={"n": 2})
    made.store.put("old_logprobs", {i: np.zeros(len(m)) for i, m in enumerate(MASKS)})
    made.store.put("advantages", {i: np.zeros(len(m)) for i, m in enumerate(MASKS)})
    with pytest.raises(
        FloatingPointError, match=r"actor's gradient norm was not finite .* 2 updates in a row, .* step 14"
    ):
        made.update("actor", UpdatePlan([[[i]] for i in range(4)], [(4, 1)] * 4, first_step=10, total_steps=100))


def far(policy_kls: list[float], target: float | None, num_ranks: int = 1) -> tuple[dict[str, float], list[Any]]:
    """Metrics and optimizer steps of an update whose steps see these KLs; two mini-batches an epoch."""
    actor = {"target_kl": target, "optimizer": {"lr": 1.0, "warmup_steps": 8}, "batch": {"epochs": 2}}
    results = [StepResult({"actor/ppo_kl": kl}, 1.0, True) for kl in policy_kls]
    made = worker(results=results, num_ranks=num_ranks, actor=actor, algorithm={"advantage": "grpo"}, **GROUPED)
    for name in ("old_logprobs", "advantages"):
        made.store.put(name, {i: np.zeros(len(mask), np.float32) for i, mask in enumerate(MASKS)})
    metrics = made.update("actor", UpdatePlan([[[0], [1]], [[3, 2]]], [(4, 2), (5, 2)], 4, 100))
    return metrics, made.engines["actor"].steps  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy_kls", "made", "stopped"),
    [
        ([0.0, 0.01, 0.0149, 0.0], 4, 0.0),  # 1.5 x 0.01 = 0.015 is nowhere exceeded
        ([0.0, 0.0151, 0.0, 0.0], 2, 1.0),  # the second mini-batch of the first epoch
        ([0.0, 0.0, 0.02, 0.0], 3, 1.0),  # the first of the second epoch
        ([0.1, 0.0, 0.0, 0.0], 1, 1.0),
        ([0.0, 0.0, 0.0, 0.1], 4, 0.0),  # there was none left to stop
        ([0.0, -0.1, 0.0, 0.0], 4, 0.0),
        ([0.0, float("nan"), 0.0, 0.0], 4, 0.0),
    ],
)
def test_an_update_ends_once_the_policy_has_gone_far(policy_kls: list[float], made: int, stopped: float) -> None:
    """Step k (from 0) has the learning rate (4 + k + 1) / 8, whatever was stopped; metrics are of the steps made."""
    metrics, steps = far(policy_kls, 0.01)
    assert [lr for _, lr, _ in steps] == [5 / 8, 6 / 8, 7 / 8, 1.0][:made]
    assert (metrics["actor/optimizer_steps"], metrics["actor/stopped_early"]) == (made, stopped)
    assert metrics["actor/ppo_kl"] == pytest.approx(np.mean(policy_kls[:made]), nan_ok=True)
    assert metrics["actor/lr"] == pytest.approx(np.mean([5 / 8, 6 / 8, 7 / 8, 1.0][:made]))


def test_without_a_target_nothing_ends_an_update() -> None:
    metrics, steps = far([0.0, 9.0, 9.0, 9.0], None)
    assert len(steps) == 4
    assert not {"actor/optimizer_steps", "actor/stopped_early"} & metrics.keys()


@pytest.mark.parametrize(("others", "made"), [(0.0, 4), (1.0, 2)])
def test_ranks_end_an_update_together(others: float, made: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's sum, added in another order, may lie on the other side of the bound: if any has gone too far, all
    end; this one never has. Every rank asks after every step."""
    asked: list[float] = []

    def all_reduce(flag: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        asked.append(float(flag))
        flag.clamp_(min=others if len(asked) == 2 else 0.0)

    monkeypatch.setattr(trainer.dist, "all_reduce", all_reduce)
    metrics, steps = far([0.0, 0.0149, 0.0149, 0.0149], 0.01, num_ranks=2)
    assert len(steps) == made
    assert asked == [0.0] * made
    assert metrics["actor/stopped_early"] == others


class Groups:
    context = "the context group"


def an_update(made: TrainerWorker, forward: bool = True) -> tuple[list[PackedBatch], dict[str, float]]:
    """The batches and metrics of one optimizer step of the actor, after forward and advantages. The other data-parallel
    rank has as many tokens, of which every figure is 0."""
    engine: Any = made.engines["actor"]
    engine.groups, engine.results = Groups(), [StepResult({}, 1.0, True)]
    if forward:
        made.forward("actor", [[0, 1]])
    own = made.advantages([0, 1], 0.0, [0.5, -0.5]).correction
    metrics = made.update("actor", UpdatePlan([[[1, 0], []]], [(4, 2)], 0, 10))
    if own is not None:
        zeros = {name: Moments(moments.count, 0.0, 0.0) for name, moments in own.means.items()}
        metrics |= (own + CorrectionFigures(zeros, own.largest, own.smallest)).metrics()
    return engine.steps[0][0], metrics


GROUPED: dict[str, Any] = {"rollout": {"n": 2}, "data": {"create": {}}}


def test_gspo_is_told_which_tokens_are_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("megarl.engines.objectives.policy_objective", lambda *given: seen.append(given))
    made = worker(algorithm={"advantage": "grpo"}, actor={"policy_loss": "gspo"}, **GROUPED)
    (first, dummy), _ = an_update(made)
    assert first.per_token["sequence"].tolist() == [0, 0, 0, 0, 1, 1, 0]  # samples 1 and 0: P = 1, R = 3 and 2
    assert dummy.per_token["sequence"].tolist() == [0]
    assert seen == [(made.config.actor, "the context group", 0.0)]


def test_without_gspo_or_correction_nothing_is_added() -> None:
    made = worker(algorithm={"advantage": "grpo"}, **GROUPED)
    (first, _), metrics = an_update(made)
    assert first.per_token.keys() == {"old_logprobs", "advantages", "loss_weight", "token_weight"}
    assert not any(name.startswith("rollout_corr/") for name in metrics)


def test_what_the_rollout_said_stands_in_for_the_pass() -> None:
    """Bypass: no forward pass; the rollout's log-probs are the old ones, here of samples 1 and 0 (as above, P = 1,
    R = 3 and 2)."""
    made = worker(algorithm={"advantage": "grpo", "correction": {"bypass": True}}, **GROUPED)
    made.store.samples[0].rollout_logprobs[:] = [-1.5, -2.5]
    (first, _), metrics = an_update(made, forward=False)
    assert first.per_token["old_logprobs"].tolist() == [20, 21, 22, 0, -1.5, -2.5, 0]
    assert "importance_weights" not in first.per_token
    assert not any(name.startswith("rollout_corr/") for name in metrics)


def test_the_kl_in_the_reward_takes_what_the_rollout_said_too() -> None:
    """k1 with coefficient 0.5: log-probs -1 and -2 less the reference's -2 and -2 are 1 and 0; the score is 0."""
    algorithm = {"advantage": "reinforce_pp", "kl_in_reward_coef": 0.5, "correction": {"bypass": True}}
    made = worker(algorithm=algorithm)
    made.store.samples[0].rollout_logprobs[:] = [-1.0, -2.0]
    made.store.put("reference_logprobs", {0: np.array([-2.0, -2.0], np.float32)})
    result = made.advantages([0], 0.5, None)
    assert result.kl == Moments(2, 1.0, 1.0)
    assert [v.tolist() for v in made.store.get("advantages", [0])] == [[-0.5, 0.0]]


def test_where_the_pass_is_redundant_the_update_gets_no_old_logprobs() -> None:
    own = {"skip_old_logprobs": "auto", "batch": {"mini_batch_prompts": 256}, "kl_loss_coef": 0.1}
    made = worker(algorithm={"advantage": "grpo"}, actor=own, **GROUPED)
    made.store.put("reference_logprobs", {i: np.zeros(len(mask), np.float32) for i, mask in enumerate(MASKS)})
    (first, _), _ = an_update(made, forward=False)
    assert first.per_token.keys() == {"advantages", "reference_logprobs", "loss_weight", "token_weight"}


def test_the_weight_of_the_entropy_bonus_comes_with_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes to the objective, and the engine computes the entropy where it is not 0; the config's is not asked."""
    seen: list[Any] = []
    monkeypatch.setattr("megarl.engines.objectives.policy_objective", lambda *given: seen.append(given))
    for coef in (0.25, 0.0):
        own = {"entropy_target": 0.2, "entropy_coef": 0.5}
        made = worker(algorithm={"advantage": "grpo"}, actor=own, results=[StepResult({}, 1.0, True)], **GROUPED)
        made.store.put("old_logprobs", {0: np.zeros(2, np.float32)})
        made.store.put("advantages", {0: np.zeros(2, np.float32)})
        made.update("actor", UpdatePlan([[[0]]], [(2, 1)], 0, 10, entropy_coef=coef))
        ((_, _, options),) = made.engines["actor"].steps  # type: ignore[attr-defined]
        assert (seen[-1], options["with_entropy"]) == ((made.config.actor, None, coef), coef != 0)


def test_correction_weighs_tokens_and_is_watched_over_all_ranks() -> None:
    """The trainer's log-probs are the rollout's, but for one token that is a third less likely."""
    correction = {"weights": "token", "reject": "token", "reject_above": 10.0}
    made = worker(algorithm={"advantage": "grpo", "correction": correction}, **GROUPED)
    made.store.samples[0].rollout_logprobs[1] += np.log(1.5)
    (first, _), metrics = an_update(made)
    found = first.per_token["importance_weights"]
    np.testing.assert_allclose(found, [1, 0, 1, 0, 1, 2 / 3, 0], atol=1e-5)  # sample 1 first; its second has no loss
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((3 + 2 / 3) / 8)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0
    assert metrics["rollout_corr/kl"] == pytest.approx(np.log(1.5) / 8, abs=1e-5)
