"""One rollout process: hosts a replica of SGLang and scores each answer as it ends."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer

from megarl.config import Config
from megarl.engines.sglang import SGLangEngine
from megarl.reshard.channel import LoadReport
from megarl.workers.generation import Group, Job, Scorer, stream_jobs


class RolloutWorker:
    """The process of one replica."""

    def setup(self, config: Config, folder: str, replica: int, gpu: int | None, log_file: str) -> None:
        """Start the engine; its weights come by sync."""
        self.engine = SGLangEngine(
            folder,
            tensor_size=config.rollout.tensor,
            rollout=config.rollout,
            precision=config.model.precision,
            max_length=config.max_length,
            base_gpu_id=gpu,
            seed=config.run.seed + replica,
            device="cpu" if gpu is None else "cuda",
            load_weights=False,
            log_file=log_file,
            deadline=config.run.deadline,
            trust_remote_code=config.model.trust_remote_code,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.tokenizer_path or folder, trust_remote_code=config.model.trust_remote_code
        )
        self.scorer = Scorer(tokenizer, config.reward)

    def heartbeat(self) -> str | None:
        """None while the replica runs; else why it does not."""
        engine: SGLangEngine | None = getattr(self, "engine", None)
        return "it did not start" if engine is None else engine.why_dead()

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Per tensor-parallel rank the (shape, type) of SGLang's own parameters."""
        return [
            {name: (info.shape, info.dtype) for name, info in rank.items()} for rank in self.engine.parameter_shapes()
        ]

    def generate(self, jobs: Sequence[Job], with_texts: bool) -> list[Group]:
        """Answer jobs, all in flight at once, each answer scored as it ends."""
        return stream_jobs(self.engine, self.scorer, jobs, with_texts)

    def sync(self, number: int, sockets: Sequence[str], version: int, deadline: float) -> list[LoadReport]:
        """Take the weights of sync `number` and their version; what each tensor-parallel rank says of it."""
        return self.engine.load_weights(number, sockets, version, deadline)

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self, tags: Sequence[str]) -> None:
        self.engine.wake(tags)

    def flush_cache(self) -> None:
        self.engine.flush_cache()

    def shutdown(self) -> None:
        self.engine.shutdown()
        self.scorer.close()
