"""Training gives the same numbers in every layout: outputs, loss, metrics, every gradient under its Hugging Face name,
and every weight after an optimizer step.

Two comparisons. One rank with one packed micro-batch against transformers, torch.autograd and torch.optim, with the
loss written out here once more; then each layout against that one rank.

The grid is not walked whole. Each layout trains actor and critic on every batching, with the aggregations turned by one
from layout to layout: so each pair of layout, role, batching and aggregation occurs. Tied and untied actors take turns.
gspo, the one policy loss that looks at more than a token, is trained in each layout too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from training_task import (
    ACTOR,
    ADAM,
    CONSTANT,
    CRITIC,
    GSPO,
    SHAPES,
    Case,
    Outcome,
    Task,
    compare,
    joined,
    make_task,
    outputs_of,
    task_of,
    train_all,
)

from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.config import ParallelConfig

LAYOUTS = {
    "tp2": (2, ParallelConfig(tensor=2)),
    "tp2sp": (2, ParallelConfig(tensor=2, sequence=True)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "vpp2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "cp2": (2, ParallelConfig(context=2)),
    "dp2": (2, ParallelConfig()),
    "tp2pp2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "tp2cp2": (4, ParallelConfig(tensor=2, context=2)),
    "tp2spcp2": (4, ParallelConfig(tensor=2, context=2, sequence=True)),
    "cp2dp2": (4, ParallelConfig(context=2)),
    "vpp2dp2": (4, ParallelConfig(pipeline=2, virtual_pipeline=2)),
    "pp2 of 1 and 2": (2, ParallelConfig(pipeline=2, first_stage_layers=1)),
    "vpp2 of 4 and 2": (2, ParallelConfig(pipeline=2, virtual_pipeline=2, first_stage_layers=4, last_stage_layers=2)),
    "vpp2 of 2 and 4": (2, ParallelConfig(pipeline=2, virtual_pipeline=2, last_stage_layers=4)),
}
NUM_LAYERS = {"pp2 of 1 and 2": 3, "vpp2 of 4 and 2": 6, "vpp2 of 2 and 4": 6}
"""4 in all others."""
BATCHINGS = ("packed in 1", "packed in 4", "padded, 1", "padded, 4")


# ------------------------------------------------------------------------------------------------ the reference


def written_out(task: Task, case: Case) -> Outcome:
    """transformers, autograd and torch.optim.AdamW; losses and their means as the papers have them."""
    config = task.model.config
    task = make_task(task.role, config.tie_word_embeddings, config.num_hidden_layers)  # its weights change
    losses: list[torch.Tensor] = []  # of each sample with loss tokens: [loss tokens]
    outputs: dict[int, Mapping[str, np.ndarray]] = {}
    means: dict[str, list[torch.Tensor]] = {}
    for number, sample in enumerate(task.samples[: case.num_samples]):
        mask = torch.tensor(sample.loss_mask)
        own = {name: values[mask] for name, values in outputs_of(task.model, task.head, sample).items()}
        outputs[number] = {name: values.detach().numpy() for name, values in own.items()}
        if not mask.any():
            continue
        given = {name: torch.tensor(values[number])[mask] for name, values in task.given.items()}
        of_policy = gspo_loss if case.policy_loss == "gspo" else ppo_loss
        loss, figures = actor_loss(own, given, of_policy) if task.role == "actor" else critic_loss(own, given)
        losses.append(loss)
        for name, figure in figures.items():
            means.setdefault(name, []).append(figure.detach())
    total = aggregate(case.aggregation, losses)
    total.backward()
    main = "actor/pg_loss" if task.role == "actor" else "critic/vf_loss"
    means["loss"] = [loss.detach() for loss in losses]

    def summed(name: str, figures: Sequence[torch.Tensor]) -> float:
        aggregation = case.aggregation if name in (main, "loss") else "token-mean"
        return float(aggregate(aggregation, figures))

    sums = {name: summed(name, figures) for name, figures in means.items()}
    magnitudes = {name: summed(name, [figure.abs() for figure in figures]) for name, figures in means.items()}
    named = dict(task.model.named_parameters())
    if task.role == "critic":
        named = {name: parameter for name, parameter in named.items() if name != "lm_head.weight"}
        named[next(n for n in task.declaration.tensors() if n not in named)] = task.head
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in named.items()}
    groups = [
        {"params": [p for p in named.values() if (p.dim() > 1) == decays], "weight_decay": ADAM.weight_decay * decays}
        for decays in (True, False)
    ]
    torch.optim.AdamW(groups, lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps).step()
    weights = {name: parameter.detach().numpy() for name, parameter in named.items()}
    norm = sum(float((gradient.astype(np.float64) ** 2).sum()) for gradient in gradients.values()) ** 0.5
    return Outcome(outputs, sums, norm, gradients, weights, magnitudes)


def ppo_loss(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    advantages = given["advantages"]
    clip_low, clip_high = ACTOR.clip_range
    ratio = (own["logprobs"] - given["old_logprobs"]).exp()
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.minimum(ratio * advantages, inside * advantages)
    bounded = torch.where(advantages < 0, torch.maximum(surrogate, ACTOR.dual_clip * advantages), surrogate)
    return {
        "actor/pg_loss": -bounded,
        "actor/pg_clipfrac": (inside * advantages < ratio * advantages).float(),
        "actor/pg_clipfrac_lower": (bounded != surrogate).float(),
    }


def gspo_loss(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each token of a sequence inside the bounds has the gradient of its own log-prob, times the sequence's ratio."""
    advantages, logprobs = given["advantages"], own["logprobs"]
    ratio = float((logprobs.detach() - given["old_logprobs"]).mean().exp())
    lowest, highest = 1 - GSPO.clip_low, 1 + GSPO.clip_high
    clipped = ((ratio > highest) & (advantages > 0)) | ((ratio < lowest) & (advantages < 0))
    inside = -advantages * ratio * (1 + logprobs - logprobs.detach())
    return {
        "actor/pg_loss": torch.where(clipped, -advantages * min(max(ratio, lowest), highest), inside),
        "actor/pg_clipfrac": clipped.float(),
        "actor/pg_clipfrac_lower": torch.zeros_like(advantages),
    }


def actor_loss(
    own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], of_policy: Callable[..., Any]
) -> tuple[torch.Tensor, Any]:
    log_ratio = given["reference_logprobs"] - own["logprobs"]
    kl = log_ratio.exp() - 1 - log_ratio
    figures = {
        **of_policy(own, given),
        "actor/ppo_kl": given["old_logprobs"] - own["logprobs"],
        "actor/entropy_in_update": own["entropy"],
        "actor/kl_loss": kl,
        "actor/kl_coef": torch.full_like(kl, ACTOR.kl_loss_coef),
    }
    loss = figures["actor/pg_loss"] - ACTOR.entropy_coef * own["entropy"] + ACTOR.kl_loss_coef * kl
    return loss, figures


def critic_loss(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any]:
    values, old, returns = own["values"], given["old_values"], given["returns"]
    near = old + (values - old).clamp(-CRITIC.value_clip, CRITIC.value_clip)
    plain, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss = torch.maximum(plain, clipped) / 2
    return loss, {"critic/vf_loss": loss, "critic/vf_clipfrac": (clipped > plain).float(), "critic/vpred_mean": values}


def aggregate(aggregation: str, losses: Sequence[torch.Tensor]) -> torch.Tensor:
    if aggregation == "token-mean":
        return torch.cat(list(losses)).mean()
    if aggregation == "seq-mean-token-sum":
        return torch.stack([loss.sum() for loss in losses]).mean()
    if aggregation == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses]).mean()
    return torch.cat(list(losses)).sum() / CONSTANT


# ------------------------------------------------------------------------------------------------ the grid


def cases_of(layout: str) -> dict[str, list[Case]]:
    """For each role one case a batching, and one of gspo."""
    num_ranks, parallel = LAYOUTS[layout]
    turn = list(LAYOUTS).index(layout)
    num_data = parallel.data_parallel(num_ranks)

    def case(number: int, batching: str) -> Case:
        size = len(SHAPES) if batching.startswith("packed") else int(batching[-1]) * num_data
        return Case(batching, AGGREGATIONS[(turn + number) % len(AGGREGATIONS)], size)

    gspo = Case(f"packed in {1 + 3 * (turn % 2)}", "seq-mean-token-mean", len(SHAPES), "gspo")
    return {
        "actor": [*(case(number, batching) for number, batching in enumerate(BATCHINGS)), gspo],
        "critic": [case(number + 1, batching) for number, batching in enumerate(BATCHINGS)],
    }


def is_tied(layout: str) -> bool:
    return list(LAYOUTS).index(layout) % 2 == 1


Of = tuple[str, bool, int]
"""A task: role, tied, layers."""


def task_key(layout: str, role: str) -> Of:
    return role, role == "actor" and is_tied(layout), NUM_LAYERS.get(layout, 4)


Key = tuple[Of, Case]


def reference_key(layout: str, role: str, case: Case) -> Key:
    return task_key(layout, role), replace(case, batching="packed in 1")


@pytest.fixture(scope="module")
def by_hand() -> dict[Key, Outcome]:
    keys = {
        reference_key(layout, role, case): None
        for layout in LAYOUTS
        for role, cases in cases_of(layout).items()
        for case in cases
    }
    return {(task, case): written_out(task_of(*task), case) for task, case in keys}


@pytest.fixture(scope="module")
def references(by_hand: dict[Key, Outcome]) -> dict[Key, Outcome]:
    """On one rank, in one packed micro-batch."""
    by_task: dict[Of, list[Case]] = {}
    for task_of_case, case in by_hand:
        by_task.setdefault(task_of_case, []).append(case)
    work = [(task_of(*of), ParallelConfig(), cases) for of, cases in by_task.items()]
    (outcomes,) = run(train_all, 1, work)
    found: dict[Key, Outcome] = {}
    for (task, parallel, cases), of, of_task in zip(work, by_task, outcomes, strict=True):
        for case, outcome in zip(cases, of_task, strict=True):
            found[of, case] = replace(joined(task, parallel, [outcome]), magnitudes=by_hand[of, case].magnitudes)
    return found


def test_every_pair_of_the_grid_occurs() -> None:
    made = {
        (layout, role, case.batching, case.aggregation)
        for layout in LAYOUTS
        for role, cases in cases_of(layout).items()
        for case in cases
    }
    choices = [set(values) for values in (LAYOUTS, ("actor", "critic"), BATCHINGS, AGGREGATIONS)]
    for one in range(4):
        for other in range(one):
            pairs = {(entry[one], entry[other]) for entry in made}
            assert len(pairs) == len(choices[one]) * len(choices[other])


def test_the_task_clips_some_tokens_but_not_all(references: dict[Key, Outcome]) -> None:
    shares = {
        (case.policy_loss, name): value
        for (_, case), outcome in references.items()
        for name, value in outcome.sums.items()
        if case.num_samples == len(SHAPES) and "clipfrac" in name
    }
    assert shares.pop(("gspo", "actor/pg_clipfrac_lower")) == 0.0
    assert sorted(shares) == [
        ("gspo", "actor/pg_clipfrac"),
        ("ppo", "actor/pg_clipfrac"),
        ("ppo", "actor/pg_clipfrac_lower"),
        ("ppo", "critic/vf_clipfrac"),
    ]
    assert all(0 < share < 0.7 for share in shares.values()), shares


def test_one_rank_trains_as_transformers_does(references: dict[Key, Outcome], by_hand: dict[Key, Outcome]) -> None:
    wrong = [f"{key}: {what}" for key, outcome in references.items() for what in compare(outcome, by_hand[key])]
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(layout: str, references: dict[Key, Outcome]) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    by_role = cases_of(layout)
    work = [(task_of(*task_key(layout, role)), parallel, cases) for role, cases in by_role.items()]
    of_rank = run(train_all, num_ranks, work)
    wrong = []
    for number, (task, _, cases) in enumerate(work):
        for position, case in enumerate(cases):
            found = joined(task, parallel, [outcomes[number][position] for outcomes in of_rank])
            wanted = references[reference_key(layout, task.role, case)]
            wrong += [f"{task.role}, {case}: {what}" for what in compare(found, wanted)]
    assert not wrong, "\n".join(wrong[:20])
