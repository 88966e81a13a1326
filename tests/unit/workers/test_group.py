"""Which rank gets what, and whose answer counts."""

from __future__ import annotations

from typing import Any

import pytest

from megarl import config
from megarl.reshard.plan import Place
from megarl.workers import group as group_module
from megarl.workers.calls import Callee
from megarl.workers.group import TrainerGroup
from megarl.workers.placement import Seat

# Eight ranks. Actor: tensor 2 x pipeline 2, two data-parallel ranks: 0 has ranks 0 1 4 5, 1 has 2 3 6 7; the last stage
# is ranks 4 to 7. Critic: eight data-parallel ranks.
CONFIG = config.build(
    {
        "model": {"create": {}},
        "data": {"create": {}},
        "cluster": {"num_nodes": 2, "gpus_per_node": 4},
        "actor": {"parallel": {"tensor": 2, "pipeline": 2}},
        "run": {"deadline": 9},
    }
)
ACTOR_DATA = [0, 0, 1, 1, 0, 0, 1, 1]


class Actor:
    """A process whose answer to a call is its rank; it notes the call."""

    def __init__(self, rank: int) -> None:
        self.rank, self.called = rank, []

    def __getattr__(self, name: str) -> Any:
        actor = self

        class Method:
            @staticmethod
            def remote(*arguments: Any) -> int:
                actor.called.append((name, *arguments))
                return actor.rank

        return Method


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> TrainerGroup:
    asked: list[tuple[list[Callee], str, float]] = []

    def gather(refs: list[Any], callees: list[Callee], stage: str, deadline: float) -> list[Any]:
        asked.append((callees, stage, deadline))
        return refs

    monkeypatch.setattr(group_module, "gather", gather)
    # The second node has no GPU that says its number.
    seats = [Seat(f"n{r // 4}", f"host{r // 4}", "", 3 - r if r < 4 else None, "", r) for r in range(8)]
    made = TrainerGroup(CONFIG, [Actor(r) for r in range(8)], seats)
    made.asked = asked  # type: ignore[attr-defined]
    return made


def test_arguments_go_by_data_parallel_rank_and_outputs_come_from_the_last_stage(group: TrainerGroup) -> None:
    assert group.forward("actor", ["first", "second"]) == [4, 6]
    assert [actor.called for actor in group.actors] == [
        [("forward", "actor", "first" if data == 0 else "second")] for data in ACTOR_DATA
    ]
    assert group.forward("critic", list("abcdefgh")) == list(range(8))
    assert [actor.called[1] for actor in group.actors] == [("forward", "critic", letter) for letter in "abcdefgh"]
    assert group.asked[0] == ([Callee(f"trainer rank {r}", f"host{r // 4}") for r in range(8)], "actor forward", 9)  # type: ignore[attr-defined]


def test_every_rank_fetches_the_samples_of_all_its_roles(group: TrainerGroup) -> None:
    """Actor's data-parallel rank 0 has samples 0 to 3, the critic's rank r has sample 7 - r."""
    handles = {i: (f"ref{i}", 0) for i in range(8)}
    group.begin_step(handles, {"actor": [[0, 1, 2, 3], [4, 5, 6, 7]], "critic": [[7 - r] for r in range(8)]})
    for rank, actor in enumerate(group.actors):
        wanted = {7 - rank, *range(4 * ACTOR_DATA[rank], 4 * ACTOR_DATA[rank] + 4)}
        assert actor.called == [("begin_step", {i: handles[i] for i in sorted(wanted)})]


def test_advantages_whitening_and_received_values(group: TrainerGroup) -> None:
    indices = [[0, 2], [1, 3]]
    assert group.advantages(indices, 0.5, [None, None]) == [4, 6]
    assert group.whiten(indices, "moments") == [4, 6]
    group.receive("actor", "values", indices, ["a", "b"])
    assert group.actors[5].called == [
        ("advantages", [0, 2], 0.5, None),
        ("whiten", [0, 2], "moments"),
        ("receive", "values", [0, 2], ["a", "b"]),
    ]


def test_scores_of_the_reward_model_go_to_the_actors_ranks(group: TrainerGroup) -> None:
    """The reward model has the layout of the critic here: every rank has samples of its own."""
    group.grids["reward_model"] = group.grids["critic"]
    assert group.retokenise([[7 - r] for r in range(8)]) == list(range(8))
    assert group.score([[[7 - r]] for r in range(8)]) == list(range(8))
    group.rescore([[0, 2], [1, 3]], [[0.5, 1.0], [1.5, 2.0]])
    own = [0.5, 1.0] if ACTOR_DATA[5] == 0 else [1.5, 2.0]
    indices = [0, 2] if ACTOR_DATA[5] == 0 else [1, 3]
    assert group.actors[5].called == [("retokenise", [2]), ("score", [[2]]), ("rescore", indices, own)]


def test_a_call_may_have_a_deadline_of_its_own(group: TrainerGroup) -> None:
    assert group.call("building", "build_role", "actor", deadline=3.0) == list(range(8))
    group.call("building", "build_role", "actor")
    assert [deadline for _, _, deadline in group.asked] == [3.0, 9]  # type: ignore[attr-defined]


def test_places_count_nodes_and_give_ranks_without_a_gpu_one_each(group: TrainerGroup) -> None:
    expected = [Place(0, 3), Place(0, 2), Place(0, 1), Place(0, 0), *(Place(1, rank) for rank in range(4, 8))]
    assert list(group.places) == expected


def test_memory_is_the_largest_of_each_figure(group: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainerGroup, "_gather", lambda *_: [{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 2.0}])
    assert group.memory() == {"a": 3.0, "b": 5.0}
