"""The rollout as the loop sees it: submit prompts, take the batch when its answers have ended, sleep while training,
resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.config import Config
from megarl.types import Prompt, SampleInfo, SamplingParams
from megarl.workers.calls import Callee, gather
from megarl.workers.generation import Group, Job


class RolloutBatch:
    """A step's samples, numbered from 0 in the order of their prompts; the driver holds scalars and references."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.infos: list[SampleInfo] = [info for group in groups for info in group.infos]
        self.texts: list[tuple[str, str]] = [text for group in groups for text in group.texts]
        self.handles: dict[int, tuple[Any, int]] = {}
        self.groups: list[list[int]] = []
        start = 0
        for group in groups:
            indices = list(range(start, start + len(group.infos)))
            self.handles.update({i: (group.samples, k) for k, i in enumerate(indices)})
            self.groups.append(indices)
            start += len(indices)

    @property
    def lengths(self) -> list[int]:
        return [info.length for info in self.infos]

    @property
    def scores(self) -> list[float]:
        return [info.score for info in self.infos]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class Rollout:
    """Replicas of the rollout engine. With the hf engine these are the trainer processes themselves."""

    def __init__(
        self, config: Config, workers: Sequence[Any], hosts: Sequence[str], embedded: bool, gpus: Sequence[str] = ()
    ) -> None:
        """
        Args:
            hosts: of the workers.
            gpus: of the workers, for errors: " (GPU 4)".
        """
        self.config, self.workers, self.embedded = config, list(workers), embedded
        name = "hf engine of trainer rank" if embedded else "SGLang replica"
        self._callees = [
            Callee(f"{name} {i}{own}", host)
            for i, (host, own) in enumerate(zip(hosts, gpus or [""] * len(hosts), strict=True))
        ]
        self._in_flight: list[list[tuple[Any, Callee]]] = []

    def submit(
        self,
        prompts: Sequence[Prompt],
        num_answers: int,
        sampling: SamplingParams,
        seed: int,
        reward: str,
        with_texts: bool = False,
    ) -> None:
        """Start generation of `num_answers` answers to each prompt on all replicas; returns at once. `reward` is the
        name of the function that scores them."""
        jobs = [Job(prompt, num_answers, sampling, seed, reward) for prompt in prompts]
        parts = np.array_split(np.arange(len(jobs)), len(self.workers))
        self._in_flight.append(
            [
                (worker.generate.remote([jobs[i] for i in part], with_texts), callee)
                for worker, callee, part in zip(self.workers, self._callees, parts, strict=True)
                if len(part)
            ]
        )

    def next_batch(self) -> RolloutBatch:
        """The batch that was submitted first, in the order of its prompts, when all its answers have ended and are
        scored."""
        assert self._in_flight, "next_batch without a batch submitted"
        calls = self._in_flight.pop(0)
        refs, callees = [ref for ref, _ in calls], [callee for _, callee in calls]
        results = gather(refs, callees, "generation", self.config.run.deadline)
        return RolloutBatch([group for result in results for group in result])  # replicas have consecutive prompts

    def sleep(self) -> None:
        """Give the weights' and the KV cache's memory back for training; no answer may be in flight. An engine on GPUs
        of its own keeps it."""
        assert not self._in_flight, "sleep with answers in flight"
        self._all("engine sleep", "sleep")

    def wake_weights(self) -> None:
        """Take memory for the weights; their content is gone and comes by sync."""
        self._all("engine wake", "wake", ("weights",))

    def resume(self) -> None:
        """Take memory for the KV cache where `sleep` gave it back, and forget what was cached under earlier weights."""
        self._all("engine wake", "wake", ("kv_cache",))
        self._all("engine cache flush", "flush_cache")

    def parameters(self) -> list[list[dict[str, tuple[tuple[int, ...], str]]]]:
        """Per replica and tensor-parallel rank, (shape, type) of the engine's own parameters."""
        return self._all("reading the engine's parameters", "parameters")

    def start_sync(
        self, number: int, sockets: Sequence[str], version: int, deadline: float
    ) -> list[tuple[Any, Callee]]:
        """Have every replica take the weights of sync `number`, while the trainers send them; returns at once.

        Args:
            sockets: of each target rank's channel.

        Returns:
            per replica the call and whom it goes to; it gives a LoadReport for each tensor-parallel rank.
        """
        size = self.config.rollout.tensor
        return [
            (worker.sync.remote(number, list(sockets[i * size : (i + 1) * size]), version, deadline), callee)
            for i, (worker, callee) in enumerate(zip(self.workers, self._callees, strict=True))
        ]

    def set_version(self, version: int) -> None:
        """Stamp the weights' version: every answer carries it."""
        self._all("stamping the version", "set_version", version)

    def shutdown(self) -> None:
        if not self.embedded:
            self._all("engine shutdown", "shutdown")

    def _all(self, stage: str, method: str, *arguments: Any) -> list[Any]:
        keeps_memory = self.embedded or self.config.rollout.num_gpus > 0
        if (keeps_memory and method in ("sleep", "wake")) or (self.embedded and method == "flush_cache"):
            return []
        refs = [getattr(w, method).remote(*arguments) for w in self.workers]
        return gather(refs, self._callees, stage, self.config.run.deadline)
