"""What a step learns from: prompts are asked until there are enough groups worth keeping.

Without options that is one question to each of the step's prompts. With rollout.oversample more are asked and those
that end first are taken (their prompts' turn comes again); with rollout.keep_groups: mixed, groups whose answers all
score the same are left out and others asked in their place (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megarl.config import Config
from megarl.data.prompts import PromptStream
from megarl.driver.rollout import Rollout, RolloutBatch
from megarl.types import Prompt
from megarl.workers.generation import Group


@dataclass
class Collection:
    """One step's prompts on their way to a batch. `collect` may be called again after a replica has died."""

    config: Config
    prompts: PromptStream
    rollout: Rollout
    ask: Callable[[list[Prompt]], None]
    """Submits prompts."""
    asked: list[Prompt] = field(default_factory=list)
    num_refills: int = 0

    def collect(self) -> tuple[RolloutBatch, dict[str, float]]:
        """The step's batch, and figures of what was left out. Prompts that were asked in vain are given back.

        Raises:
            ReplicaDied: replace it, sync, and call this again.
        """
        own, want = self.config.rollout, self.config.data.prompts_per_step
        if not self.asked:
            self._ask(want)
        while True:
            ended = self.rollout.ended
            kept = [number for number, group in ended.items() if keeps(group, own.keep_groups)]
            missing = want - len(kept)
            if missing <= 0:
                break
            is_allowed = len(self.asked) < self.config.asked_prompts(want) * (1 + own.max_refills)
            if missing > self.rollout.num_open and is_allowed:
                self.num_refills += 1
                self._ask(missing - self.rollout.num_open)
            if not self.rollout.num_open:
                break
            if self.rollout.embedded:  # it answers all at once
                self.rollout.wait(self.rollout.num_open)
            elif own.keep_groups == "mixed":  # a group that is left out is made up for while the others go on
                self.rollout.wait(1)
            else:
                self.rollout.wait(missing)
        if not self.rollout.num_open:
            kept.sort()  # all came: which of them came first does not matter
        equal = [number for number in ended if not keeps(ended[number], own.keep_groups)]
        kept = [*kept, *sorted(equal)][:want]  # nothing better was to be had
        used = {ended[number].infos[0].group for number in (*kept, *equal)}
        batch, unanswered = self.rollout.finish(kept)
        self.prompts.put_back([prompt for prompt in self.asked if prompt.uid not in used])
        figures = {
            "rollout/asked_prompts": float(len(self.asked)),
            "rollout/unanswered_prompts": float(len(unanswered)),
            "rollout/equal_groups": float(len(equal)),
            "rollout/refills": float(self.num_refills),
        }
        return batch, figures

    def _ask(self, count: int) -> None:
        new = self.prompts.next(self.config.asked_prompts(count))
        self.asked += new
        self.ask(new)


def keeps(group: Group, rule: str) -> bool:
    """Whether a group is worth learning from: always, or ("mixed") where its answers' rewards differ."""
    return rule == "all" or not group.has_equal_rewards
