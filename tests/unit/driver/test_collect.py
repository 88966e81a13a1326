"""A step's prompts on their way to a batch: what is asked, kept, left out and given back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import config
from megarl.data.prompts import PromptSet, PromptStream
from megarl.driver.collect import Collection, keeps
from megarl.driver.rollout import ReplicaDied, RolloutBatch
from megarl.types import Prompt, SampleInfo
from megarl.workers.generation import Group


def group(uid: str, *scores: float) -> Group:
    infos = tuple(SampleInfo(f"{uid}/{k}", uid, 1, 1, 1, s, "stop", "s", 0) for k, s in enumerate(scores))
    return Group(infos, f"ref of {uid}")


class FakeRollout:
    """Answers prompts in an order of its own (`pick`, of the numbers that are open), as many as are waited for. Their
    scores are those that the test gives for the row."""

    def __init__(self, scores: Callable[[str], tuple[float, ...]], pick: Callable[[list[int]], int] = min) -> None:
        self.scores, self.pick = scores, pick
        self.submitted: list[Prompt] = []
        self.embedded = False
        self.ended: dict[int, Group] = {}
        self.waits: list[int] = []
        self.die_at: int | None = None
        """Before so many answers in all, a replica dies, and takes the first answer with it."""
        self.finished: list[int] | None = None

    def submit(self, prompts: list[Prompt]) -> None:
        self.submitted += prompts

    @property
    def num_open(self) -> int:
        return len(self.submitted) - len(self.ended)

    def wait(self, at_least: int) -> None:
        assert 0 < at_least <= self.num_open
        self.waits.append(at_least)
        for _ in range(at_least):
            if self.die_at is not None and len(self.ended) >= self.die_at:
                self.die_at = None
                for number in list(self.ended)[:1]:
                    del self.ended[number]
                raise ReplicaDied("SGLang replica 1 failed")
            number = self.pick([n for n in range(len(self.submitted)) if n not in self.ended])
            uid = self.submitted[number].uid
            self.ended[number] = group(uid, *self.scores(uid))

    def finish(self, numbers: Sequence[int]) -> tuple[RolloutBatch, list[Any]]:
        assert set(numbers) <= set(self.ended)
        assert len(set(numbers)) == len(numbers)
        self.finished = list(numbers)
        left = [prompt for number, prompt in enumerate(self.submitted) if number not in self.ended]
        return RolloutBatch([self.ended[number] for number in sorted(numbers)]), left


def stream(size: int, want: int) -> PromptStream:
    prompts = tuple(Prompt(str(i), np.array([i]), "s", "") for i in range(size))
    return PromptStream(PromptSet(prompts), want, seed=0, shuffle=False)


def collection(own: FakeRollout, prompts: PromptStream, want: int, **rollout: Any) -> Collection:
    built = config.build(
        {
            "model": {"create": {}},
            "data": {"create": {}, "prompts_per_step": want},
            "actor": {"batch": {"mini_batch_prompts": want}},
            "critic": {"batch": {"mini_batch_prompts": want}},
            "rollout": {"n": 2, **rollout},
        }
    )
    return Collection(built, prompts, own, own.submit)  # type: ignore[arg-type]


def groups_of(batch: RolloutBatch) -> list[str]:
    return list(dict.fromkeys(info.group for info in batch.infos))


def asked_next(prompts: PromptStream, count: int) -> list[str]:
    return [prompt.uid for prompt in prompts.next(count)]


def mixed_but(*equal: int) -> Callable[[str], tuple[float, ...]]:
    """Scores differ, but for these rows."""
    return lambda uid: (1.0, 1.0) if int(uid.split("-")[1]) in equal else (1.0, 0.0)


def test_a_step_asks_each_of_its_prompts_once_and_takes_them_all() -> None:
    own, prompts = FakeRollout(mixed_but(0, 1, 2, 3), pick=max), stream(10, 4)
    batch, figures = collection(own, prompts, 4).collect()
    assert groups_of(batch) == ["0-0", "0-1", "0-2", "0-3"]  # equal scores too
    assert own.waits == [4]
    assert figures == {
        "rollout/asked_prompts": 4.0,
        "rollout/unanswered_prompts": 0.0,
        "rollout/equal_groups": 0.0,
        "rollout/refills": 0.0,
    }
    assert asked_next(prompts, 2) == ["0-4", "0-5"]


def test_of_more_prompts_those_are_taken_that_end_first_and_the_others_come_again() -> None:
    """Four are wanted, ceil(4 x 1.4) = 6 are asked, and the last ones end first."""
    own, prompts = FakeRollout(mixed_but(), pick=max), stream(20, 4)
    batch, figures = collection(own, prompts, 4, oversample=1.4).collect()
    assert groups_of(batch) == ["0-2", "0-3", "0-4", "0-5"]
    assert (figures["rollout/asked_prompts"], figures["rollout/unanswered_prompts"]) == (6.0, 2.0)
    assert asked_next(prompts, 4) == ["0-0", "0-1", "0-6", "0-7"]


def test_where_all_have_ended_it_does_not_matter_which_came_first() -> None:
    """Two more than waited for come together with the others."""

    class Eager(FakeRollout):
        def wait(self, at_least: int) -> None:
            super().wait(self.num_open)

    batches = []
    for pick in (min, max):
        own, prompts = Eager(mixed_but(), pick=pick), stream(20, 4)
        batch, figures = collection(own, prompts, 4, oversample=1.5).collect()
        batches.append(groups_of(batch))
        assert figures["rollout/unanswered_prompts"] == 0.0
        assert asked_next(prompts, 3) == ["0-4", "0-5", "0-6"]  # answered in vain
    assert batches == [["0-0", "0-1", "0-2", "0-3"]] * 2


def test_groups_of_equal_scores_are_left_out_and_others_asked_in_their_place() -> None:
    """1, 2 and 5 are equal: as soon as one is, another prompt is asked while the others go on."""
    own, prompts = FakeRollout(mixed_but(1, 2, 5)), stream(20, 4)
    batch, figures = collection(own, prompts, 4, keep_groups="mixed").collect()
    assert groups_of(batch) == ["0-0", "0-3", "0-4", "0-6"]
    assert own.waits == [1] * 7
    assert figures == {
        "rollout/asked_prompts": 7.0,
        "rollout/unanswered_prompts": 0.0,
        "rollout/equal_groups": 3.0,
        "rollout/refills": 3.0,
    }
    assert asked_next(prompts, 2) == ["0-7", "0-8"]  # those left out do not come again


def test_a_step_is_filled_up_with_what_was_left_out_when_nothing_better_was_to_be_had() -> None:
    """Of four prompts, up to 2 x 4 others are asked in place of equal ones."""
    own, prompts = FakeRollout(mixed_but(*range(20)), pick=max), stream(20, 4)
    batch, figures = collection(own, prompts, 4, keep_groups="mixed", max_refills=2).collect()
    assert groups_of(batch) == ["0-0", "0-1", "0-2", "0-3"]
    assert (figures["rollout/refills"], figures["rollout/equal_groups"]) == (8.0, 12.0)
    own, prompts = FakeRollout(mixed_but(0, 1, 3), pick=max), stream(20, 4)
    batch, figures = collection(own, prompts, 4, keep_groups="mixed", max_refills=0).collect()
    assert groups_of(batch) == ["0-0", "0-1", "0-2", "0-3"]
    assert figures["rollout/refills"] == 0.0


def test_the_hf_engine_is_waited_for_as_a_whole() -> None:
    """It answers all at once on each rank; which rank is done first is not to decide what is asked."""
    own, prompts = FakeRollout(mixed_but(1, 2)), stream(20, 4)
    own.embedded = True
    batch, figures = collection(own, prompts, 4, keep_groups="mixed").collect()
    assert groups_of(batch) == ["0-0", "0-3", "0-4", "0-5"]
    assert (own.waits, figures["rollout/refills"]) == ([4, 2], 1.0)


def test_more_prompts_and_mixed_groups_together() -> None:
    """Eight are asked for four. First come 7, 6, 5, 4, of which 6 and 5 are equal; then 3 and 2, of which 3 is equal;
    then 1. Prompt 0 was not answered."""
    own, prompts = FakeRollout(mixed_but(6, 5, 3), pick=max), stream(20, 4)
    batch, figures = collection(own, prompts, 4, keep_groups="mixed", oversample=2.0).collect()
    assert groups_of(batch) == ["0-1", "0-2", "0-4", "0-7"]
    assert (figures["rollout/equal_groups"], figures["rollout/refills"]) == (3.0, 0.0)
    assert asked_next(prompts, 2) == ["0-0", "0-8"]


def test_a_refill_is_asked_as_soon_as_what_is_open_cannot_be_enough() -> None:
    """Six are asked for four (x 1.5). When the first three are equal, three are open and four missing, so ceil(1 x 1.5)
    = 2 more are asked; the fourth is equal too."""
    own, prompts = FakeRollout(mixed_but(0, 1, 2, 3)), stream(20, 4)
    batch, figures = collection(own, prompts, 4, keep_groups="mixed", oversample=1.5).collect()
    assert groups_of(batch) == ["0-4", "0-5", "0-6", "0-7"]
    assert (figures["rollout/asked_prompts"], figures["rollout/refills"]) == (8.0, 1.0)
    assert asked_next(prompts, 1) == ["0-8"]


@pytest.mark.parametrize("die_at", range(5))
def test_after_a_replicas_death_nothing_is_asked_that_was_asked_before(die_at: int) -> None:
    own, prompts = FakeRollout(mixed_but(1)), stream(20, 4)
    own.die_at = die_at
    step = collection(own, prompts, 4, keep_groups="mixed")
    with pytest.raises(ReplicaDied):
        step.collect()
    assert own.finished is None
    batch, figures = step.collect()
    assert groups_of(batch) == ["0-0", "0-2", "0-3", "0-4"]
    assert (figures["rollout/asked_prompts"], figures["rollout/refills"]) == (5.0, 1.0)


def test_a_death_while_the_others_are_stopped_leaves_the_step_as_it_was() -> None:
    own, prompts = FakeRollout(mixed_but(), pick=max), stream(20, 4)
    step, finish = collection(own, prompts, 4, oversample=1.5), own.finish

    def die(numbers: Sequence[int]) -> Any:
        raise ReplicaDied("SGLang replica 1 failed")

    own.finish = die  # type: ignore[method-assign]
    with pytest.raises(ReplicaDied):
        step.collect()
    own.finish = finish  # type: ignore[method-assign]
    batch, _ = step.collect()
    assert groups_of(batch) == ["0-2", "0-3", "0-4", "0-5"]
    assert asked_next(prompts, 3) == ["0-0", "0-1", "0-6"]


def test_what_is_worth_learning_from() -> None:
    assert keeps(group("0-1", 1.0, 1.0), "all")
    assert not keeps(group("0-1", 1.0, 1.0), "mixed")
    assert not keeps(group("0-1", 1.0), "mixed")
    assert keeps(group("0-1", 1.0, 1.0, 0.5), "mixed")


def test_answers_that_differ_in_the_penalty_for_their_length_alone_are_equal() -> None:
    """0.1 - 0.3 and 0.1 - 0.7, from which the penalty cannot be taken without a rounding error."""
    short, long = (replace(group("0-1", 0.1 - p).infos[0], penalty=-p) for p in (0.3, 0.7))
    assert short.score - short.penalty != long.score - long.penalty
    assert not keeps(Group((short, long), None), "mixed")
    assert keeps(Group((short, replace(long, penalty=-0.1)), None), "mixed")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 5),
    st.floats(1.0, 3.0),
    st.booleans(),
    st.integers(0, 3),
    st.sets(st.integers(0, 39)),
    st.integers(0, 2**16),
)
def test_no_prompt_is_lost_or_asked_twice_in_a_step(
    want: int, oversample: float, is_mixed: bool, refills: int, equal: set[int], seed: int
) -> None:
    """Over four steps: each batch has its size; each prompt is in one batch, or left out for its equal scores, or comes
    again."""
    prompts, random = stream(40, want), np.random.default_rng(seed)
    used: list[str] = []
    for _ in range(4):
        own = FakeRollout(mixed_but(*equal), pick=lambda numbers: int(random.choice(numbers)))
        rule = "mixed" if is_mixed else "all"
        step = collection(own, prompts, want, oversample=oversample, keep_groups=rule, max_refills=refills)
        batch, _ = step.collect()
        asked = [prompt.uid for prompt in own.submitted]
        assert len(set(asked)) == len(asked)
        taken = groups_of(batch)
        assert len(taken) == want
        left_out = [g.infos[0].group for g in own.ended.values() if is_mixed and not keeps(g, "mixed")]
        used += set(taken) | set(left_out)
        back = [uid for uid in asked if uid not in used]
        assert prompts.state_dict()["returned"][: len(back)] == back
    assert len(set(used)) == len(used)
