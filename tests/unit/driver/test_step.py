"""The learning half of a step against a trainer group that writes down what it is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import config
from megarl.algorithms.advantages import Moments
from megarl.algorithms.correction import CorrectionFigures
from megarl.algorithms.diagnostics import Mismatch
from megarl.algorithms.entropy import AdaptiveEntropyController, EntropyController
from megarl.config import Config
from megarl.driver import step as step_module
from megarl.driver.rollout import RolloutBatch
from megarl.driver.step import Learning, Timer, learn, resident
from megarl.metrics import Stats
from megarl.parallel.topology import RankGrid
from megarl.types import SampleInfo
from megarl.workers.calls import WorkerError
from megarl.workers.generation import Group
from megarl.workers.messages import AdvantageResult, ForwardResult, Retokenised, UpdatePlan, WhitenedResult
from tests.reward_models import write_reward_model

ONE = Moments(1, 1.0, 1.0)


class FakeGroup:
    """Answers with as many results as the role has data-parallel ranks; data-parallel rank d's numbers are d + 1."""

    def __init__(self, made: Config) -> None:
        self.grids = {role: RankGrid(made.cluster.num_ranks, parallel) for role, parallel in made.roles().items()}
        self.calls: list[tuple[Any, ...]] = []
        self.config = made

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def call(self, stage: str, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))

    def begin_step(self, handles: Any, assignments: Any) -> dict[str, float]:
        self.calls.append(("begin_step", handles, assignments))
        return {"perf/gpu_used_asleep_gb": 1.5}

    def forward(self, role: str, micro_batches: Sequence[Any]) -> list[ForwardResult]:
        self.calls.append(("forward", role, micro_batches))
        results = []
        for data in range(self.grids[role].data_parallel_size):
            moments = Moments(1, data + 1.0, (data + 1.0) ** 2)
            extra = (
                (moments, Mismatch(moments, data + 1.0), Stats(2, 4.0, 3.0, 1.0), None)
                if role == "actor"
                else (None, None, None, Stats.of([data + 1.0]))
            )
            results.append(ForwardResult(f"{role} {data}", *extra))
        return results

    def retokenise(self, indices: Any) -> list[Retokenised]:
        """The reward model reads 10 x (i + 1) tokens of sample i; each rank has cut one short."""
        self.calls.append(("retokenise", indices))
        return [Retokenised([10 * (i + 1) for i in part], 1) for part in indices]

    def score(self, micro_batches: Any) -> list[dict[int, float]]:
        """Sample i scores i / 8."""
        self.calls.append(("score", micro_batches))
        return [{i: i / 8 for bins in part for i in bins} for part in micro_batches]

    def rescore(self, indices: Any, scores: Any) -> None:
        self.calls.append(("rescore", indices, scores))

    def receive(self, role: str, name: str, indices: Any, refs: Any) -> None:
        self.calls.append(("receive", role, name, indices, refs))

    def advantages(self, indices: Any, kl_coef: float, given: Any) -> list[AdvantageResult]:
        self.calls.append(("advantages", indices, kl_coef, given))
        figures: list[Any] = [None] * len(indices)
        if self.config.algorithm.correction.is_on:  # rank 0 has 1, rank 1 has 2, each of one token
            names = ("chi2_token", "chi2_seq", "kl")
            of = [Moments(1, d + 1.0, (d + 1.0) ** 2) for d, _ in enumerate(indices)]
            figures = [CorrectionFigures(dict.fromkeys(names, m), {"rollout_is_max": m.total}) for m in of]
        return [AdvantageResult(ONE, Moments(2, 1.0, 1.0), Stats.of([1.0]), found) for found in figures]

    def whiten(self, indices: Any, moments: Moments | None) -> list[WhitenedResult]:
        self.calls.append(("whiten", moments))
        stats = Stats.of([2.0])
        return [
            WhitenedResult(stats, stats, Moments(2, 1.0, 1.0), Moments(2, 2.0, 4.0), f"returns {d}")
            for d, _ in enumerate(indices)
        ]

    def update(self, role: str, plans: Sequence[UpdatePlan]) -> dict[str, float]:
        self.calls.append(("update", role, plans))
        return {f"{role}/grad_norm": 1.0}


def made_config(**sections: Any) -> Config:
    return config.build(
        {
            "model": {"create": {}},
            "data": {"create": {}, "prompts_per_step": 4, "max_prompt_length": 8, "max_response_length": 8},
            "cluster": {"gpus_per_node": 4},
            "actor": {"parallel": {"tensor": 2}, "batch": {"mini_batch_prompts": 2}},
            "critic": {"batch": {"mini_batch_prompts": 4, "epochs": 3}},
            "rollout": {"n": 2},
            **sections,
        }
    )


def made_batch() -> RolloutBatch:
    return RolloutBatch(made_groups())


def made_groups() -> list[Group]:
    """Four prompts with two answers each; sample i has i loss tokens of i + 1, so that sample 0 has none."""
    groups = []
    for prompt in range(4):
        infos = [
            SampleInfo(f"0-{prompt}/{k}", f"0-{prompt}", 2, i + 1, i, float(k), "stop", "s", 0)
            for k, i in enumerate((2 * prompt, 2 * prompt + 1))
        ]
        groups.append(Group(tuple(infos), f"samples of {prompt}"))
    return groups


def run(
    made: Config,
    step: int = 1,
    kl_coef: float = 0.0,
    batch: RolloutBatch | None = None,
    timer: Timer | None = None,
    entropy: EntropyController | None = None,
) -> tuple[FakeGroup, dict[str, float], Moments, dict[str, int]]:
    group, counts = FakeGroup(made), {"actor": 5, "critic": 7}
    learning = Learning(made, group, hidden_size=16, total_steps=10)  # type: ignore[arg-type]
    metrics, kl = learn(learning, batch or made_batch(), step, kl_coef, counts, timer or Timer(), entropy)
    return group, metrics, kl, counts


def trained(plan: UpdatePlan) -> list[list[int]]:
    """The samples of each mini-batch."""
    return [sorted(i for indices in micro_batches for i in indices) for micro_batches in plan.mini_batches]


@pytest.mark.parametrize("dynamic", [True, False])
def test_every_sample_is_trained_by_exactly_one_data_parallel_rank(dynamic: bool) -> None:
    made = made_config(
        actor={
            "parallel": {"tensor": 2},
            "batch": {"mini_batch_prompts": 2, "dynamic": dynamic, "micro_batch_size": 2, "max_tokens_per_gpu": 16},
        }
    )
    group, _, _, _ = run(made)
    plans = dict(group.of("update"))
    assert {role: len(own) for role, own in plans.items()} == {"critic": 4, "actor": 2}
    for role, mini_batches in (("actor", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("critic", [[0, 1, 2, 3, 4, 5, 6, 7]])):
        for number, expected in enumerate(mini_batches):
            assert sorted(i for plan in plans[role] for i in trained(plan)[number]) == expected
            assert len({len(plan.mini_batches[number]) for plan in plans[role]}) == 1
    # The rank that trains a sample is the one that fetched it and gave its log-probs.
    _, assignments = group.of("begin_step")[0]
    forward = dict(group.of("forward"))
    for role, own in plans.items():
        assert [sorted(sum(trained(plan), [])) for plan in own] == [sorted(part) for part in assignments[role]]
        assert [sorted(i for bins in part for i in bins) for part in forward[role]] == assignments[role]


def test_the_loss_divides_by_tokens_and_sequences_of_all_ranks() -> None:
    """Actor: samples 0 to 3 have 0 + 1 + 2 + 3 = 6 loss tokens in 3 sequences, 4 to 7 have 22 in 4; critic: 28 in 7."""
    group, _, _, counts = run(made_config())
    plans = dict(group.of("update"))
    assert [plan.denominators for plan in plans["actor"]] == [[(6, 3), (22, 4)]] * 2
    assert [plan.denominators for plan in plans["critic"]] == [[(28, 7)]] * 4
    # Two optimizer steps a step of the loop for the actor, one x three epochs for the critic; ten steps in all.
    assert {(plan.first_step, plan.total_steps) for plan in plans["actor"]} == {(5, 20)}
    assert {(plan.first_step, plan.total_steps) for plan in plans["critic"]} == {(7, 30)}
    assert counts == {"actor": 7, "critic": 10}


def test_critic_warm_up_leaves_the_actor_alone() -> None:
    made = made_config(run={"critic_warmup": 2})
    group, metrics, _, counts = run(made, step=2)
    assert [role for role, _ in group.of("update")] == ["critic"]
    assert (counts["actor"], "actor/grad_norm" in metrics) == (5, False)
    group, _, _, counts = run(made, step=3)
    assert [role for role, _ in group.of("update")] == ["critic", "actor"]
    assert counts["actor"] == 7


def test_values_and_returns_go_to_the_ranks_that_need_them() -> None:
    group, metrics, kl, _ = run(made_config(algorithm={"kl_in_reward_coef": 0.1}), kl_coef=0.1)
    _, assignments = group.of("begin_step")[0]
    assert group.of("receive") == [
        ("actor", "values", assignments["actor"], [f"critic {d}" for d in range(4)]),
        ("actor", "reference_logprobs", assignments["actor"], [f"reference {d}" for d in range(4)]),
        ("critic", "returns", assignments["critic"], ["returns 0", "returns 1"]),
    ]
    assert group.names().index("advantages") > group.names().index("receive")
    ((indices, kl_coef, given),) = group.of("advantages")
    assert (indices, kl_coef, given) == (assignments["actor"], 0.1, [None, None])
    # Sums over the two data-parallel ranks of the actor whiten everyone's advantages.
    assert group.of("whiten") == [(Moments(2, 2.0, 2.0),)]
    assert kl == Moments(4, 2.0, 2.0)
    # Returns of both ranks: 4 tokens, sum 4, squares 8: variance 4/3; residuals: sum 2, squares 2: variance 1/3.
    expected = {
        "critic/vf_explained_var": 0.75,
        "actor/reward_kl_penalty": 0.5,
        "actor/reward_kl_penalty_coeff": 0.1,
        "actor/entropy": 1.5,
        "training/rollout_probs_diff_max": 2.0,
        "training/rollout_probs_diff_mean": 1.5,
        "training/rollout_logprobs_abs_diff_mean": 2.0,
        "critic/values/mean": 2.5,
        "critic/values/max": 4.0,
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 1.0,
        "global_seqlen/mean": 26.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_group_advantages_follow_their_samples_to_their_ranks() -> None:
    """Answer 0 of each prompt scored 0, answer 1 scored 1: RLOO gives -1 and 1, that is, by the sample's parity."""
    group, metrics, _, _ = run(made_config(algorithm={"advantage": "rloo"}))
    ((indices, _, given),) = group.of("advantages")
    assert given == [[1.0 if i % 2 else -1.0 for i in part] for part in indices]
    assert group.of("whiten") == [(None,)]
    assert [role for role, _ in group.of("forward")] == ["actor"]
    assert "critic/vf_explained_var" not in metrics


def test_remax_compares_with_the_greedy_answer_to_the_same_prompt() -> None:
    """Prompt p's greedy answer scored p / 4; its two answers scored 0 and 1."""
    groups = [
        replace(group, infos=tuple(replace(info, baseline=prompt / 4) for info in group.infos))
        for prompt, group in enumerate(made_groups())
    ]
    made = made_config(algorithm={"advantage": "remax"})
    assert made.needs_greedy_baseline
    group, metrics, _, _ = run(made, batch=RolloutBatch(groups))
    ((indices, _, given),) = group.of("advantages")
    assert given == [[i % 2 - (i // 2) / 4 for i in part] for part in indices]
    assert [role for role, _ in group.of("forward")] == ["actor"]
    assert group.of("whiten") == [(None,)]
    assert "critic/vf_explained_var" not in metrics
    groups[2] = made_groups()[2]
    with pytest.raises(ValueError, match="2 of 8 answers have none, the first is 0-2/0"):
        run(made, batch=RolloutBatch(groups))


# ------------------------------------------------------------------------------------------------ the reward model


def with_reward_model(folder: Path, **own: Any) -> Config:
    scoring = {"path": str(write_reward_model(folder)), "max_length": 100, "weight": 2.0, "rule_weight": 0.5, **own}
    return made_config(algorithm={"advantage": "rloo"}, reward_model=scoring)


def test_advantages_are_of_the_rules_and_the_models_scores_together(tmp_path: Path) -> None:
    """Sample i scores 0.5 x (i modulo 2) + 2 x i / 8: the second answer to a prompt 0.75 more than the first."""
    made, timer = with_reward_model(tmp_path), Timer()
    group, metrics, _, _ = run(made, timer=timer)
    ((indices, _, given),) = group.of("advantages")
    assert given == [[0.75 if i % 2 else -0.75 for i in part] for part in indices]
    scores = [0.5 * (i % 2) + i / 4 for i in range(8)]
    assert group.of("rescore") == [(indices, [[scores[i] for i in part] for part in indices])]
    assert group.names().index("rescore") < group.names().index("advantages")
    expected = {
        "critic/score/mean": sum(scores) / 8,
        "critic/score/max": 2.25,
        "reward_model/score/mean": 28 / 64,
        "reward_model/score/max": 0.875,
        "reward_model/score/min": 0.0,
        "reward_model/truncated": 4.0,
        "reward/rule/mean": 0.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "reward_model" in timer.seconds


def test_micro_batches_of_the_reward_model_hold_its_own_tokens(tmp_path: Path) -> None:
    """Samples of 10 to 80 tokens, 360 in all, make four balanced micro-batches of 90; the policy's would fit in one."""
    whole = {"tensor": 2, "pipeline": 2}
    group, _, _, _ = run(with_reward_model(tmp_path, forward_max_tokens_per_gpu=100, parallel=whole))
    ((_, assignments),), ((read,),), (((batches,),),) = (group.of(n) for n in ("begin_step", "retokenise", "score"))
    assert read == assignments["reward_model"] == [list(range(8))]
    assert sorted(sorted(bins) for bins in batches) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_every_rank_scores_the_samples_that_it_read(tmp_path: Path) -> None:
    group, _, _, _ = run(with_reward_model(tmp_path))
    ((read,),), ((batches,),) = group.of("retokenise"), group.of("score")
    assert (len(read), sorted(i for part in read for i in part)) == (4, list(range(8)))
    assert [sorted(i for bins in part for i in bins) for part in batches] == read


def test_the_reward_model_is_on_the_gpu_while_it_scores(tmp_path: Path) -> None:
    group, _, _, _ = run(with_reward_model(tmp_path, offload={"parameters": True}))
    own = [call[0] for call in group.calls if call[0] == "score" or call[1:2] == ("reward_model",)]
    assert own == ["resume", "score", "release"]


def test_without_a_reward_model_scores_are_the_rules(tmp_path: Path) -> None:
    group, metrics, _, _ = run(made_config())
    assert not {"retokenise", "score", "rescore"} & set(group.names())
    assert not [name for name in metrics if name.startswith(("reward_model/", "reward/"))]


# ------------------------------------------------------------------------------------------------ the actor's pass

OF_THE_ACTORS_PASS = (
    "actor/entropy",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
    "training/rollout_logprobs_abs_diff_mean",
)
ONE_STEP: dict[str, Any] = {"batch": {"mini_batch_prompts": 4}, "skip_old_logprobs": "auto"}


@pytest.mark.parametrize(
    ("sections", "skips"),
    [
        ({}, False),
        ({"actor": {"batch": {"mini_batch_prompts": 4}}}, False),  # never skips unless asked to
        ({"actor": ONE_STEP}, True),
        ({"actor": {**ONE_STEP, "kl_loss_coef": 0.1}}, True),
        ({"actor": {**ONE_STEP, "batch": {"mini_batch_prompts": 2}}}, False),  # two optimizer steps
        ({"actor": {**ONE_STEP, "batch": {"mini_batch_prompts": 4, "epochs": 2}}}, False),
        ({"actor": ONE_STEP, "algorithm": {"kl_in_reward_coef": 0.1}}, False),  # the KL looks at them
        ({"actor": ONE_STEP, "algorithm": {"correction": {"weights": "token"}}}, False),
        ({"actor": {**ONE_STEP, "entropy_target": 0.2}}, False),
        ({"algorithm": {"correction": {"bypass": True}}}, True),
        ({"algorithm": {"correction": {"bypass": True}, "kl_in_reward_coef": 0.1}}, True),  # the KL takes the rollout's
    ],
)
def test_the_actors_pass_is_left_out_where_nobody_looks_at_it(sections: dict[str, Any], skips: bool) -> None:
    made, timer = made_config(**sections), Timer()
    assert made.skips_old_logprobs == skips
    group, metrics, _, counts = run(made, timer=timer, kl_coef=made.algorithm.kl_in_reward_coef)
    passes = ["actor"] * (not skips) + ["reference"] * made.needs_reference + ["critic"]
    assert [role for role, _ in group.of("forward")] == passes
    assert ("old_log_prob" in timer.seconds) == (not skips)
    assert [name in metrics for name in OF_THE_ACTORS_PASS] == [not skips] * 5
    assert "critic/values/mean" in metrics
    assert [role for role, _ in group.of("update")] == ["critic", "actor"]
    assert counts["actor"] == 5 + made.optimizer_steps(made.actor.batch)


def test_more_optimizer_steps_than_the_config_has_would_need_the_pass() -> None:
    """Eight prompts where the configuration has four make two mini-batches: the second is not on-policy."""
    double = RolloutBatch([*made_groups(), *made_groups()])
    with pytest.raises(AssertionError, match="log-probs before the update are not those in it"):
        run(made_config(actor=ONE_STEP), batch=double)


# ------------------------------------------------------------------------------------------------ entropy


def test_the_entropy_bonus_is_the_configs_or_the_controllers() -> None:
    """The entropy before the update is 1.5 in the fake group: a bonus is in force with a target of 1.5 or more."""
    fixed = made_config(actor={"entropy_coef": 0.25, "batch": {"mini_batch_prompts": 2}})
    group, metrics, _, _ = run(fixed)
    assert {plan.entropy_coef for plan in dict(group.of("update"))["actor"]} == {0.25}
    assert "actor/entropy_coef" not in metrics
    for target, expected in ((1.4, 0.0), (1.5, 0.125), (1.6, 0.125)):
        batch, parallel = {"mini_batch_prompts": 2}, {"tensor": 2}
        made = made_config(actor={"entropy_target": target, "batch": batch, "parallel": parallel})
        group, metrics, _, _ = run(made, entropy=AdaptiveEntropyController(0.125, target, 0.01))
        plans = dict(group.of("update"))
        assert {plan.entropy_coef for plan in plans["actor"]} == {expected}
        assert {plan.entropy_coef for plan in plans["critic"]} == {0.0}
        assert metrics["actor/entropy_coef"] == expected


def test_each_estimator_gets_the_options_it_looks_at() -> None:
    """Prompt p has samples 2p and 2p + 1 with so many loss tokens, scored 0 and 1. OPO's baseline is the second's share
    of the tokens; GRPO divides by the standard deviation, sqrt(0.5), unless told not to."""
    group, _, _, _ = run(made_config(algorithm={"advantage": "opo"}))
    ((indices, _, given),) = group.of("advantages")
    shares = [(i | 1) / ((i & ~1) + (i | 1)) for i in range(8)]
    assert given == [[pytest.approx(i % 2 - shares[i]) for i in part] for part in indices]
    for normalise_by_std, size in ((True, 0.5**0.5), (False, 0.5)):
        group, _, _, _ = run(made_config(algorithm={"advantage": "grpo", "normalise_by_std": normalise_by_std}))
        ((indices, _, given),) = group.of("advantages")
        assert given == [[pytest.approx(size if i % 2 else -size, rel=1e-5) for i in part] for part in indices]


@pytest.mark.parametrize(
    ("algorithm", "whitens", "has_groups"),
    [
        ({"advantage": "gae", "whiten_advantages": False}, False, False),
        ({"advantage": "reinforce_pp", "kl_in_reward_coef": 0.1}, True, False),
        ({"advantage": "reinforce_pp", "whiten_advantages": False}, False, False),
        ({"advantage": "reinforce_pp_baseline"}, True, True),
        ({"advantage": "gpg"}, False, True),
    ],
)
def test_who_whitens_does_so_by_the_sums_of_all_ranks(
    algorithm: dict[str, Any], whitens: bool, has_groups: bool
) -> None:
    group, metrics, _, _ = run(made_config(algorithm=algorithm), kl_coef=algorithm.get("kl_in_reward_coef", 0.0))
    assert group.of("whiten") == [(Moments(2, 2.0, 2.0) if whitens else None,)]
    ((_, _, given),) = group.of("advantages")
    assert (given != [None, None]) == has_groups
    assert ("critic/vf_explained_var" in metrics) == (algorithm["advantage"] == "gae")
    assert ("reference" in dict(group.of("forward"))) == ("kl_in_reward_coef" in algorithm)


def test_a_sample_over_the_limit_names_the_key() -> None:
    """The configuration does not let it come so far; the error is the last line of defence."""
    made = made_config(actor={"kl_loss_coef": 0.1, "parallel": {"tensor": 2}, "batch": {"mini_batch_prompts": 2}})
    short = replace(made, reference=replace(made.reference, forward_max_tokens_per_gpu=3))
    with pytest.raises(ValueError, match=r"\(reference\.forward_max_tokens_per_gpu x context size\)"):
        run(short)
    short = replace(made, actor=replace(made.actor, batch=replace(made.actor.batch, forward_max_tokens_per_gpu=3)))
    with pytest.raises(ValueError, match=r"\(actor\.batch\.forward_max_tokens_per_gpu x context size\)"):
        run(short)


# ------------------------------------------------------------------------------------------------ memory

OFFLOADS = [
    ({}, True, []),
    ({"parameters": True}, False, ["parameters"]),
    ({"parameters": True, "gradients": True, "optimizer": True}, False, ["parameters"]),
    ({"parameters": True, "gradients": True, "optimizer": True}, True, ["parameters", "gradients", "optimizer"]),
    ({"gradients": True}, True, ["gradients"]),
    ({"optimizer": True}, False, []),
]


def test_figures_of_the_rollout_correction_are_those_of_all_ranks() -> None:
    made = made_config(algorithm={"correction": {"weights": "token"}})
    _, metrics, _, _ = run(made)
    assert (metrics["rollout_corr/kl"], metrics["rollout_corr/rollout_is_max"]) == (1.5, 2.0)
    assert not any(name.startswith("rollout_corr/") for name in run(made_config())[1])


@pytest.mark.parametrize(("offload", "training", "kinds"), OFFLOADS)
def test_resident_brings_and_releases_what_the_config_offloads(
    offload: dict[str, bool], training: bool, kinds: list[str]
) -> None:
    made = made_config(critic={"offload": offload, "batch": {"mini_batch_prompts": 4}})
    group = FakeGroup(made)
    brought = [("resume", "critic", kinds)] if kinds else []
    released = [("release", "critic", kinds)] if kinds else []
    with resident(group, "critic", made, training):  # type: ignore[arg-type]
        assert group.calls == brought
    assert group.calls == brought + released
    with pytest.raises(KeyError), resident(group, "critic", made, training):  # type: ignore[arg-type]
        raise KeyError
    assert group.calls == (brought + released) * 2


def test_parameters_stay_for_the_sync_that_follows() -> None:
    every = {"parameters": True, "gradients": True, "optimizer": True}
    made = made_config(actor={"offload": every, "batch": {"mini_batch_prompts": 4}})
    group = FakeGroup(made)
    with resident(group, "actor", made, training=True, parameters_stay=True):  # type: ignore[arg-type]
        pass
    assert group.calls[-1] == ("release", "actor", ["gradients", "optimizer"])


@pytest.mark.parametrize("error", [WorkerError("rank 3 died"), KeyboardInterrupt()])
def test_nothing_is_asked_of_ranks_that_may_be_gone(error: BaseException) -> None:
    """A call to a stuck rank would wait for the deadline, and its error would hide the first one."""
    made = made_config(
        reference={"offload": {"parameters": True}}, actor={"kl_loss_coef": 0.1, "batch": {"mini_batch_prompts": 4}}
    )
    group = FakeGroup(made)
    with pytest.raises(type(error)), resident(group, "reference", made, training=False):  # type: ignore[arg-type]
        raise error
    assert group.calls == [("resume", "reference", ["parameters"])]


def test_roles_are_resident_in_turn() -> None:
    every = {"parameters": True, "gradients": True, "optimizer": True}
    made = made_config(
        actor={"offload": every, "parallel": {"tensor": 2}, "batch": {"mini_batch_prompts": 2}},
        critic={"offload": every, "batch": {"mini_batch_prompts": 4}},
    )
    group, _, _, _ = run(made)
    inside: set[tuple[str, str]] = set()
    for name, *arguments in group.calls:
        if name == "resume":
            assert not inside, "two roles on the GPU at once"
            inside |= {(arguments[0], kind) for kind in arguments[1]}
        elif name == "release":
            inside -= {(arguments[0], kind) for kind in arguments[1]}
        elif name == "forward":
            assert inside == {(arguments[0], "parameters")}
        elif name == "update":
            assert inside == {(arguments[0], kind) for kind in every}
        else:
            assert not inside, f"{name} while {inside} are on the GPU"
    assert inside == {("actor", "parameters")}  # for the sync


def test_the_timer_adds_up_and_counts_failed_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(step_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    timer = Timer()
    with timer("a"):
        pass
    with pytest.raises(KeyError), timer("a"):
        raise KeyError
    assert timer.seconds == {"a": 2.5}
