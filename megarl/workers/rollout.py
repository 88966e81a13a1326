"""One rollout process: hosts a replica of SGLang and scores each answer as it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config import Config
from megarl.engines.sglang import SGLangEngine, import_sglang
from megarl.reshard.channel import LoadReport
from megarl.workers.generation import Generation, Job, Stopped, Taken


class RolloutWorker:
    """The process of one replica."""

    def setup(
        self,
        config: Config,
        folder: str,
        replica: int,
        gpu: int | None,
        log_file: str,
        stop_token_ids: Sequence[int],
    ) -> None:
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
        self.generation = Generation.of(self.engine, config, folder, stop_token_ids)

    def import_engine(self) -> None:
        """Import SGLang, which takes seconds, before `setup` needs it."""
        import_sglang()

    def heartbeat(self) -> str | None:
        """None while the replica runs; else why it does not."""
        engine: SGLangEngine | None = getattr(self, "engine", None)
        return "it did not start" if engine is None else engine.why_dead()

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Per tensor-parallel rank the (shape, type) of SGLang's own parameters."""
        return [
            {name: (info.shape, info.dtype) for name, info in rank.items()} for rank in self.engine.parameter_shapes()
        ]

    def submit_jobs(self, jobs: Mapping[int, Job]) -> None:
        """Begin to answer jobs, all in flight at once; their numbers are the driver's."""
        self.generation.submit(jobs)

    def take_groups(self, at_least: int, wait: float) -> Taken:
        """Groups that have ended and are scored: so many, or what there is after `wait` seconds."""
        return self.generation.take(at_least, wait)

    def stop_jobs(self, deadline: float) -> Stopped:
        """End all that is under way."""
        return self.generation.stop(deadline)

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
        try:
            self.engine.shutdown()
        finally:
            self.generation.close()
