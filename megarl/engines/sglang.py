"""One SGLang replica, hosted by the calling process: generation, weight updates, sleeping.

SGLang runs its schedulers in child processes, and a scheduler that fails signals its parent: give the engine a process
of its own (a Ray actor), and build it in that process's main thread, so that the failure becomes an exception here,
with the end of SGLang's log. Methods may be called from any thread; they wait with a deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import difflib
import inspect
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import typing
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import psutil

from megarl.compat import sglang_cpu
from megarl.config import SGLANG_REPACKING_MOE
from megarl.reshard import channel, transports
from megarl.reshard.channel import LoadReport
from megarl.types import Activity, FinishReason, GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from megarl.config import RolloutConfig

T = TypeVar("T")

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

WAKE_TAGS = ("weights", "kv_cache")

LOADERS = {
    loader.__name__: f"{loader.__module__}.{loader.__name__}"
    for loader in (channel.load_weights, transports.describe_parameters)
}

LEFT_TO_SGLANG = ("attention_backend", "chunked_prefill_size", "max_prefill_tokens")
"""Of rollout.sglang, under the same names as in ServerArgs: where they are null, SGLang chooses."""

CHOICES_OF_SGLANG = ("attention_backend", "kv_cache_dtype")
"""Of rollout.sglang, those for which the installed SGLang has a list of values."""

CONTEXT_SLACK = 8
"""SGLang keeps a few positions of its context for itself: max_length tokens need that many more."""

CPU_MAX_RUNNING = 256
CPU_MAX_TOKENS = 1 << 18
"""Without a GPU: bounds of the batch and of the KV cache, which is committed as it is used."""

POLL_SECONDS = 0.5
LOOK_SECONDS = 0.25
"""Between two looks at what a replica does."""
LOG_TAIL_LINES = 40
LOG_TAIL_WIDTH = 500
DEATH_LINES = 8
"""Of the log, where a run goes on without the replica."""


def import_sglang() -> None:
    """Import what the engine needs, which takes seconds."""
    sglang_cpu.engine_class()


class EngineDied(RuntimeError):
    """A process of SGLang has ended: the replica answers no more."""


class SGLangEngine:
    """A tensor-parallel SGLang replica: tokens in, tokens out."""

    answers_at_once = False

    def __init__(
        self,
        model_path: str,
        tensor_size: int,
        rollout: RolloutConfig,
        precision: Literal["bf16", "fp32"],
        max_length: int,
        *,
        seed: int,
        device: Literal["cpu", "cuda"],
        base_gpu_id: int | None = None,
        load_weights: bool = True,
        trust_remote_code: bool = False,
        log_file: str | None = None,
        deadline: float = 600.0,
    ) -> None:
        """Start the replica and wait until it is ready.

        Args:
            max_length: tokens of the longest prompt and answer together.
            base_gpu_id: GPU of the first tensor-parallel rank, as this process numbers them; the others follow.
            load_weights: False starts with random weights: they come by sync.
            log_file: takes all that SGLang prints; without it, warnings and errors go to stderr.
            deadline: seconds that any call may take.

        Raises:
            ValueError: an option that SGLang does not know, with the nearest one that it does.
            RuntimeError: SGLang did not start; with the end of its log. Or it would pack or reorder its weights after
                loading, so that no sync could write them.
        """
        self.tensor_size = tensor_size
        self.max_length = max_length
        self.sleeps = device == "cuda" and rollout.sleeps
        self._graph_tags = ("cuda_graph",) if self.sleeps and rollout.sglang.release_cuda_graphs else ()
        self.deadline = deadline
        self.log_file = log_file
        self.weight_version = 0
        self._asleep: set[str] = set()
        self._is_flushed = False
        self._rids: dict[str, str] = {}
        """SGLang's names of the requests in flight."""
        self._looks: list[Load] = []
        self._processes: list[psutil.Process] = []
        engine_class = sglang_cpu.engine_class()
        from sglang.srt.server_args import ServerArgs

        if reason := repacking(device, precision):
            raise RuntimeError(f"SGLang cannot take weights here: {reason}")
        known = list(inspect.signature(ServerArgs).parameters)
        check_choices(rollout, option_choices(ServerArgs))
        options = server_options(
            model_path,
            tensor_size,
            rollout,
            precision,
            max_length,
            seed=seed,
            device=device,
            known=known,
            base_gpu_id=base_gpu_id,
            load_weights=load_weights,
            trust_remote_code=trust_remote_code,
            log_level="info" if log_file else "warning",
        )
        self._replies = tempfile.mkdtemp(prefix="megarl-sglang-")
        before = set(psutil.Process().children(recursive=True))
        try:
            with (
                _environment(environment_options(device, tensor_size, bool(self._graph_tags))),
                _host_logging(log_file),
            ):
                self._engine = engine_class(**options, custom_sigquit_handler=_ignore_child_failure)
        except Exception as error:
            self._processes = [p for p in psutil.Process().children(recursive=True) if p not in before]
            self.shutdown()
            raise RuntimeError(f"SGLang did not start: {error}{self._log_tail()}") from error
        self._processes = [p for p in psutil.Process().children(recursive=True) if p not in before]
        # SGLang's own shutdown kills every child of this process, also those that are not SGLang's.
        atexit.unregister(self._engine.shutdown)
        atexit.register(self.shutdown)
        self._watched = [p for p in self._processes if _is_worker(p)]
        if reason := repacking(device, precision, _moe_runner(self._engine)):
            self.shutdown()
            raise RuntimeError(f"SGLang cannot take weights here: {reason}")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-engine", daemon=True)
        self._thread.start()
        self._submit(self._look())
        if log_file is not None and rollout.sglang.log_stats > 0:
            self._submit(self._log_stats(log_file, rollout.sglang.log_stats))

    # -------------------------------------------------------------------------------------------- generation

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """One answer a request, in the order of the requests; all are in flight at once.

        Raises:
            RuntimeError: SGLang refused a request (with its reason; the others are aborted), or died.
        """
        by_uid = {result.uid: result for result in self.stream(requests)}
        return [by_uid[request.uid] for request in requests]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """The same answers, each as it ends. Closing the iterator aborts those that have not.

        Raises:
            ValueError: two requests with one uid, an empty prompt, or more tokens than max_length.
            RuntimeError: as `generate`.
        """
        answers: queue.SimpleQueue[GenerationResult | Exception] = queue.SimpleQueue()
        self.start(requests, answers.put)
        left = {request.uid for request in requests}
        try:
            while left:
                answer = self._next_answer(answers)
                if isinstance(answer, Exception):
                    self.check()  # what a request fails of then is a consequence
                    raise answer
                left.discard(answer.uid)
                yield answer
        finally:
            if left and self.is_alive:
                self.abort(left)

    def start(self, requests: Sequence[GenerationRequest], put: Callable[[GenerationResult | Exception], None]) -> None:
        """Ask for answers, all in flight at once; `put` gets each result as it ends, from the engine's own thread, and
        a RuntimeError for a request that SGLang refused.

        Raises:
            ValueError: two requests with one uid, an empty prompt, or more tokens than max_length.
            RuntimeError: the engine sleeps, or has died.
        """
        check_requests(requests, self.max_length)
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))} released); wake it first")
        self._check_alive("generate")
        self._is_flushed = False
        flight = uuid.uuid4().hex
        self._rids.update({request.uid: f"{flight}-{index}" for index, request in enumerate(requests)})
        self._submit(self._fly(requests, put))

    def abort(self, uids: Iterable[str]) -> None:
        """End these requests; each is answered with what it has, finish_reason "abort". Returns at once."""
        rids = {self._rids[uid] for uid in uids if uid in self._rids}

        def each() -> None:
            """Until they are gone: SGLang passes over a request that it is yet to hear of."""
            for rid in rids.intersection(self._rids.values()):
                self._engine.tokenizer_manager.abort_request(rid=rid)
            if rids.intersection(self._rids.values()):
                self._loop.call_later(POLL_SECONDS, each)

        self._loop.call_soon_threadsafe(each)

    def abort_all(self) -> None:
        """End every request in flight; each is answered with what it has, finish_reason "abort"."""

        async def abort() -> None:
            self._engine.tokenizer_manager.abort_request(abort_all=True)

        self._call(abort(), "abort_all")

    def check(self) -> None:
        """Raises EngineDied when a process of SGLang has ended."""
        self._check_alive("generate")

    def activity(self) -> Activity:
        """What the replica did since this was last asked."""
        looks, self._looks = self._looks, []
        return summarize(looks)

    async def _fly(
        self, requests: Sequence[GenerationRequest], put: Callable[[GenerationResult | Exception], None]
    ) -> None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        async def one(request: GenerationRequest) -> None:
            try:
                asked = GenerateReqInput(
                    input_ids=[int(t) for t in request.prompt_ids],
                    sampling_params=sampling_options(request),
                    return_logprob=True,
                    rid=self._rids[request.uid],
                )
                output = await anext(self._engine.tokenizer_manager.generate_request(asked, None))
                put(parse_output(request.uid, output, self.weight_version))
            except Exception as error:
                # FastAPI's HTTPException holds the reason in detail and has an empty str().
                reason = getattr(error, "detail", None) or str(error) or type(error).__name__
                put(RuntimeError(f"SGLang refused request {request.uid}: {reason}"))
            finally:
                self._rids.pop(request.uid, None)

        await asyncio.gather(*(one(request) for request in requests))

    def _next_answer(self, answers: queue.SimpleQueue[T]) -> T:
        while True:
            try:
                return answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                self.check()

    async def _look(self) -> None:
        """See what the replica does while requests are in flight. SGLang's schedulers leave it in shared memory: nobody
        is asked, and nobody waits."""
        while self.is_alive:
            await asyncio.sleep(LOOK_SECONDS)
            if self._rids:
                with contextlib.suppress(Exception):  # a look that is missing is no reason to stop
                    self._looks.append(load_figures(await self._engine.tokenizer_manager.get_loads()))

    async def _log_stats(self, log_file: str, seconds: float) -> None:
        """Say every so many seconds what the replica does."""
        while self.is_alive:
            await asyncio.sleep(seconds)
            try:
                line = stats_line(load_figures(await self._engine.tokenizer_manager.get_loads()))
            except Exception as error:  # a line that is missing is no reason to stop
                line = f"no statistics: {type(error).__name__}: {error}"
            with open(log_file, "a", encoding="utf-8") as file:
                file.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {line}\n")

    # -------------------------------------------------------------------------------------------- weights

    def parameter_shapes(self) -> list[dict[str, transports.ParameterInfo]]:
        """Per tensor-parallel rank the names, shapes and dtypes of SGLang's own parameters."""
        replies = self._run_loader("describe_parameters", lambda reply, _: transports.describe_envelope(reply))
        return [transports.parse_description(reply) for reply in replies]

    def load_weights(
        self, sync: int, sockets: Sequence[str], version: int, deadline: float | None = None
    ) -> list[LoadReport]:
        """Take the weights that the hosts of this replica's ranks send, in one request to SGLang.

        The KV cache keeps what the old weights computed: call `flush_cache` afterwards.

        Args:
            sync: its number, as the hosts count.
            sockets: of the `Channel` of each tensor-parallel rank, in their order.
            version: stamped on the engine.
            deadline: seconds; the engine's own by default.

        Returns:
            what each tensor-parallel rank says of its own parameters; compare it with the trainers'.

        Raises:
            RuntimeError: a rank could not take its weights; names the rank and the reason. The weights may be neither
                the old nor the new ones then, and the version is UNVERIFIED.
        """
        assert len(sockets) == self.tensor_size, (
            f"{len(sockets)} sockets for {self.tensor_size} tensor-parallel ranks: one each is needed"
        )

        def envelope(reply: str, rank: int) -> str:
            return channel.load_envelope(reply, sockets[rank], sync, self.deadline if deadline is None else deadline)

        try:
            replies = self._run_loader("load_weights", envelope, version)
        except RuntimeError as error:
            for path in sockets:
                channel.give_up(path, sync, str(error).splitlines()[0])
            with contextlib.suppress(RuntimeError):  # it may be dead
                self.set_version(channel.UNVERIFIED)
            raise
        return [LoadReport.from_json(reply) for reply in replies]

    def set_version(self, version: int) -> None:
        """Stamp the weights; answers that end from now on carry it."""
        stamp = self._engine.tokenizer_manager

        async def update() -> None:
            if hasattr(stamp, "update_weight_version"):
                from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

                await stamp.update_weight_version(
                    UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
                )
            else:
                stamp._update_weight_version_if_provided(str(version))

        self._call(update(), "set_version")
        self.weight_version = version

    def _run_loader(self, loader: str, envelope: Callable[[str, int], str], version: int | None = None) -> list[Any]:
        """Run one of LOADERS in every tensor-parallel rank and return what each answered.

        Args:
            envelope: what a loader gets, from the file that it answers in and its rank.
            version: stamped on the engine with the same request.
        """
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        call = uuid.uuid4().hex
        replies = [os.path.join(self._replies, f"{call}-{rank}") for rank in range(self.tensor_size)]
        names = [envelope(reply, rank) for rank, reply in enumerate(replies)]
        takes_version = "weight_version" in inspect.signature(UpdateWeightsFromTensorReqInput).parameters
        stamp = {"weight_version": str(version)} if version is not None and takes_version else {}
        update = UpdateWeightsFromTensorReqInput(
            # SGLang wants a tensor with each name; an empty one needs no shared memory.
            serialized_named_tensors=[MultiprocessingSerializer.serialize([(n, torch.empty(0))]) for n in names],
            load_format=LOADERS[loader],
            # A flush that SGLang refuses inside an update kills its scheduler (0.5.17).
            flush_cache=False,
            **stamp,
        )
        with self._update_session():
            _require_success(
                self._call(self._engine.tokenizer_manager.update_weights_from_tensor(update, None), loader)
            )
        answers = self._read_replies(loader, replies)
        if version is not None and takes_version:
            self.weight_version = version
        elif version is not None:
            self.set_version(version)
        return answers

    @contextlib.contextmanager
    def _update_session(self) -> Iterator[None]:
        """From 0.5.18 or so on SGLang takes weights only between these two; before, there is neither."""
        if not hasattr(self._engine, "begin_weight_update"):
            yield
            return
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

        manager = self._engine.tokenizer_manager
        begin, end = BeginWeightUpdateReqInput(selector="all"), EndWeightUpdateReqInput()
        _require_success(self._call(manager.begin_weight_update(begin, None), "begin_weight_update"))
        try:
            yield
        finally:
            if self.is_alive:
                _require_success(self._call(manager.end_weight_update(end, None), "end_weight_update"))

    def _read_replies(self, loader: str, paths: Sequence[str]) -> list[Any]:
        """What each rank answered; raises the error that says most, if some failed."""
        answers, errors = [], []
        for rank, path in enumerate(paths):
            try:
                answers.append(transports.read_reply(path))
            except RuntimeError as error:
                errors.append(f"{loader} failed in tensor-parallel rank {rank}: {error}")
        if errors:
            raise RuntimeError(min(errors, key=lambda text: channel.WENT_AWAY in text))
        return answers

    # -------------------------------------------------------------------------------------------- memory

    def sleep(self) -> None:
        """Release the GPU memory of weights and KV cache. The weights' content is lost: wake, then sync.

        Does nothing without a GPU, on GPUs of the engine's own, or with rollout.sglang.sleep off.

        Raises:
            RuntimeError: answers are in flight.
        """
        tags = [tag for tag in (*WAKE_TAGS, *self._graph_tags) if tag not in self._asleep]
        if not self.sleeps or not tags:
            return
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        # SGLang asserts that it is idle, in the scheduler; a cache that can be flushed says so without that risk.
        self.flush_cache()
        request = ReleaseMemoryOccupationReqInput(tags=tags)
        self._call(self._engine.tokenizer_manager.release_memory_occupation(request, None), "sleep")
        self._asleep.update(tags)

    def wake(self, tags: Sequence[str] = WAKE_TAGS) -> None:
        """Take back the memory of "weights" or "kv_cache", or both. What is awake stays so; captured CUDA graphs come
        with the KV cache."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        own = self._graph_tags if "kv_cache" in tags else ()
        released = [tag for tag in (*tags, *own) if tag in self._asleep]
        if not released:
            return
        request = ResumeMemoryOccupationReqInput(tags=released)
        self._call(self._engine.tokenizer_manager.resume_memory_occupation(request, None), "wake")
        self._asleep.difference_update(released)

    def flush_cache(self, patience: float = 10.0) -> None:
        """Forget the KV cache of all prefixes; nothing where no answer came since the last time.

        Raises:
            RuntimeError: SGLang still works on requests after `patience` seconds.
        """
        if self._is_flushed:
            return
        end = time.monotonic() + patience
        while True:
            answer = self._call(self._engine.tokenizer_manager.flush_cache(), "flush_cache")
            if answer.success:
                self._is_flushed = True
                return
            if time.monotonic() > end:
                raise RuntimeError(
                    f"SGLang is not idle after {patience:g} s: {answer.message or 'requests are in flight'}; "
                    "wait for them or call abort_all"
                )
            time.sleep(0.02)

    # -------------------------------------------------------------------------------------------- life

    @property
    def is_alive(self) -> bool:
        """Whether every process of SGLang runs."""
        return bool(self._processes) and all(_runs(process) for process in self._watched)

    def shutdown(self, deadline: float = 30.0) -> None:
        """End SGLang's processes and wait until they are gone. May be called twice.

        Raises:
            RuntimeError: a process is still there after `deadline` seconds.
        """
        engine = getattr(self, "_engine", None)
        watchdog = getattr(getattr(engine, "tokenizer_manager", None), "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        processes = {p for process in self._processes for p in _tree(process)}
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(processes, timeout=deadline)
        self._processes = []
        if hasattr(self, "_loop"):
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
        _close_sockets(engine, getattr(engine, "tokenizer_manager", None))
        for path in _socket_files(getattr(engine, "port_args", None)):
            with contextlib.suppress(OSError):
                os.unlink(path)
        shutil.rmtree(self._replies, ignore_errors=True)
        atexit.unregister(self.shutdown)
        if left:
            raise RuntimeError(f"SGLang's processes {sorted(p.pid for p in left)} did not end in {deadline:g} s")

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run a coroutine of SGLang's on the engine's loop, and notice when SGLang dies or takes too long."""
        self._check_alive(what, coroutine)
        future = self._submit(coroutine)
        end = time.monotonic() + self.deadline
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if future.done():
                    raise
                self._check_alive(what)
                if time.monotonic() > end:
                    future.cancel()
                    raise RuntimeError(
                        f"SGLang did not answer {what} in {self.deadline:g} s{self._log_tail()}"
                    ) from None

    def _check_alive(self, what: str, unstarted: Coroutine[Any, Any, Any] | None = None) -> None:
        if not self.is_alive:
            if unstarted is not None:
                unstarted.close()
            raise EngineDied(f"{what}: SGLang has died, or was shut down{self._endings()}{self._log_tail()}")

    def why_dead(self) -> str | None:
        """How SGLang ended, with the end of its log; None while it runs."""
        return None if self.is_alive else f"SGLang has died{self._endings()}{log_tail(self.log_file, DEATH_LINES)}"

    def _endings(self) -> str:
        """ ": the scheduler (pid 71) was killed by SIGKILL", of each process that has ended, where SGLang knows it."""
        manager = getattr(getattr(self, "_engine", None), "tokenizer_manager", None)
        watchdog = getattr(manager, "_subprocess_watchdog", None)
        watched = zip(getattr(watchdog, "_names", ()), getattr(watchdog, "_processes", ()), strict=False)
        said = [f"{name} (pid {p.pid}) {_ending(p.exitcode)}" for name, p in watched if p.exitcode is not None]
        return f": {', '.join(said)}" if said else ""

    def _log_tail(self) -> str:
        return log_tail(self.log_file)


def log_tail(log_file: str | None, num_lines: int = LOG_TAIL_LINES) -> str:
    """The end of a replica's log, for errors; nothing without one."""
    if log_file is None or not os.path.exists(log_file):
        return ""
    with open(log_file, encoding="utf-8", errors="replace") as file:
        lines = [line[:LOG_TAIL_WIDTH].rstrip() for line in file.readlines()[-num_lines:]]
    return "\n".join(["", f"--- the end of {log_file}:", *lines])


def _ending(exit_code: int) -> str:
    """_ending(-9) == "was killed by SIGKILL" """
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"was killed by signal {-exit_code}"


# ------------------------------------------------------------------------------------------------ pure parts


def server_options(
    model_path: str,
    tensor_size: int,
    rollout: RolloutConfig,
    precision: str,
    max_length: int,
    *,
    seed: int,
    device: str,
    known: Sequence[str],
    base_gpu_id: int | None = None,
    load_weights: bool = True,
    trust_remote_code: bool = False,
    log_level: str = "warning",
) -> dict[str, Any]:
    """SGLang's ServerArgs for one replica.

    Args:
        known: the fields of this SGLang's ServerArgs. Names differ between versions; of ours, those that it lacks are
            left out, while a user's own (rollout.sglang.options, merged last) must be known.

    Raises:
        ValueError: an unknown name in rollout.sglang.options, with the nearest known one.
    """
    for name in rollout.sglang.options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"rollout.sglang.options.{name}: this SGLang has no such option{hint}")
    options: dict[str, Any] = {
        "model_path": model_path,
        "tp_size": tensor_size,
        "dtype": DTYPES[precision],
        "context_length": max_length + CONTEXT_SLACK,
        "random_seed": seed,
        "trust_remote_code": trust_remote_code,
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "skip_server_warmup": True,
        "load_format": "auto" if load_weights else "dummy",  # dummy reads nothing: weights come by sync
        "custom_weight_loader": list(LOADERS.values()),
        "weight_version": "0",
        "log_level": log_level,
        "device": device,
        "ep_size": rollout.sglang.expert,
        "dp_size": rollout.sglang.data_parallel,
        "enable_dp_attention": rollout.sglang.data_parallel > 1,  # else dp_size would be so many replicas in one engine
        "enable_dp_lm_head": rollout.sglang.data_parallel_head,
        "disable_radix_cache": not rollout.sglang.radix_cache,
        "kv_cache_dtype": rollout.sglang.kv_cache_dtype,
    }
    options |= _cuda_options(rollout, base_gpu_id) if device == "cuda" else _cpu_options(rollout, max_length)
    for name in LEFT_TO_SGLANG:
        if getattr(rollout.sglang, name) is not None:
            options[name] = getattr(rollout.sglang, name)
    return {name: value for name, value in options.items() if name in known} | dict(rollout.sglang.options)


def option_choices(server_args: type) -> dict[str, list[str]]:
    """By name the values that this SGLang's ServerArgs takes, for those options that have a list of them."""
    try:
        hints = typing.get_type_hints(server_args, include_extras=True)
    except (NameError, TypeError):  # nothing to check by
        return {}
    found = {}
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            if getattr(note, "choices", None):
                found[name] = [str(choice) for choice in note.choices]
    return found


def check_choices(rollout: RolloutConfig, choices: Mapping[str, Sequence[str]]) -> None:
    """Raises:
    ValueError: a value that the installed SGLang does not know, with those that it does.
    """
    for name in CHOICES_OF_SGLANG:
        value = getattr(rollout.sglang, name)
        if value is not None and name in choices and value not in choices[name]:
            raise ValueError(
                f"rollout.sglang.{name}: is {value!r}, but this SGLang knows only {', '.join(choices[name])}"
            )


def repacking(device: str, precision: str, moe_runner: str = "auto") -> str | None:
    """Why SGLang's weights would not lie where the layouts say, if so: it packs or reorders them after loading.

    Args:
        moe_runner: that SGLang has chosen.
    """
    if moe_runner.startswith(SGLANG_REPACKING_MOE):
        return (
            f"its MoE runner {moe_runner} reorders the experts' weights after loading; set "
            f"rollout.sglang.options.moe_runner_backend to triton"
        )
    if device == "cpu" and precision != "fp32":
        from sglang.srt.utils import cpu_has_amx_support

        if cpu_has_amx_support():
            return (
                f"on this CPU (AMX) it packs {precision} weights after loading; set model.precision to fp32, or "
                f"uninstall the CPU build of sgl_kernel"
            )
    return None


def _moe_runner(engine: Any) -> str:
    """The MoE runner that SGLang has chosen; what it was asked for where it does not say."""
    asked = engine.server_args
    with contextlib.suppress(ImportError, AttributeError):
        from sglang.srt.arg_groups.overrides import resolved_view

        return str(resolved_view(asked).moe_runner_backend)
    return str(getattr(asked, "moe_runner_backend", "auto"))


@dataclass(frozen=True)
class Load:
    """What a replica does at a moment."""

    num_running: int
    num_waiting: int
    cache_use: float
    """Share of the KV cache that requests hold."""
    hit_rate: float
    """Share of prompt tokens that came from the radix cache, of late."""
    tokens_per_second: float


def load_figures(loads: Sequence[Any]) -> Load:
    """SGLang's load snapshots, one a data-parallel rank, as one."""
    return Load(
        sum(getattr(load, "num_running_reqs", 0) for load in loads),
        sum(getattr(load, "num_waiting_reqs", 0) for load in loads),
        max((getattr(load, "token_usage", 0.0) for load in loads), default=0.0),
        max((getattr(load, "cache_hit_rate", 0.0) for load in loads), default=0.0),
        sum(getattr(load, "gen_throughput", 0.0) for load in loads),
    )


def summarize(looks: Sequence[Load]) -> Activity:
    """Means and maxima of looks at equal intervals."""
    running, waiting = [look.num_running for look in looks], [look.num_waiting for look in looks]
    return Activity(
        len(looks),
        sum(running) / max(len(looks), 1),
        max(running, default=0),
        sum(waiting) / max(len(looks), 1),
        max(waiting, default=0),
        max((look.cache_use for look in looks), default=0.0),
    )


def stats_line(load: Load) -> str:
    """A line of the replica's log: "megarl: 12 running, 3 waiting, KV cache 41%, ..." """
    return (
        f"megarl: {load.num_running} running, {load.num_waiting} waiting, KV cache {load.cache_use:.0%}, "
        f"{load.tokens_per_second:,.0f} tokens/s, {load.hit_rate:.0%} of prompt tokens from the radix cache"
    )


def _cuda_options(rollout: RolloutConfig, base_gpu_id: int | None) -> dict[str, Any]:
    sglang = rollout.sglang
    return {
        "base_gpu_id": base_gpu_id or 0,
        "mem_fraction_static": sglang.memory_fraction,
        "max_running_requests": sglang.max_running_requests,
        "enable_memory_saver": rollout.sleeps,
        "disable_cuda_graph": rollout.sglang.eager,
        "disable_prefill_cuda_graph": True,  # capturing them takes 68 s of a start of 114 s (0.5.17, H200)
        "cuda_graph_max_bs_decode": sglang.cuda_graph_max_batch,
        "cuda_graph_max_bs": sglang.cuda_graph_max_batch,  # its name before 0.5.17
    }


def _cpu_options(rollout: RolloutConfig, max_length: int) -> dict[str, Any]:
    running = min(rollout.sglang.max_running_requests, CPU_MAX_RUNNING)
    return {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "max_running_requests": running,
        "max_total_tokens": max(
            min(running * (max_length + CONTEXT_SLACK), CPU_MAX_TOKENS), max_length + CONTEXT_SLACK
        ),
    }


def environment_options(device: str, tensor_size: int, release_cuda_graphs: bool = False) -> dict[str, str]:
    """SGLang's settings that are environment variables only."""
    # context_length may exceed the model's own by CONTEXT_SLACK: no token is ever generated there.
    options = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if release_cuda_graphs:
        options["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if device == "cpu":
        options["TORCHDYNAMO_DISABLE"] = "1"  # compiling a few small functions costs seconds
        options["GLOO_SOCKET_IFNAME"] = "lo"
        if tensor_size > 1:  # else SGLang wants a NUMA node for each rank
            cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
            shares = [cpus[rank % len(cpus) :: tensor_size] for rank in range(tensor_size)]
            options["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return options


def sampling_options(request: GenerationRequest) -> dict[str, Any]:
    """SGLang's sampling parameters. It stops at its model's end-of-sequence tokens too, which are among ours.

    The seed counts with rollout.sglang.options.enable_deterministic_inference only, which is slower; SGLang ignores it
    otherwise. Greedy answers have log-probs at temperature 1, as SGLang turns temperature 0 into top_k 1.
    """
    sampling = request.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": request.seed % 2**31,
    }


def check_requests(requests: Sequence[GenerationRequest], max_length: int) -> None:
    """Raises ValueError for two requests with one uid, an empty prompt, or more tokens than `max_length`.

    SGLang itself would answer with fewer tokens than were asked for.
    """
    if len({request.uid for request in requests}) != len(requests):
        raise ValueError("two requests have the same uid")
    for request in requests:
        prompt, answer = len(request.prompt_ids), request.sampling.max_new_tokens
        if prompt == 0:
            raise ValueError(f"request {request.uid}: the prompt is empty")
        if prompt + answer > max_length:
            raise ValueError(
                f"request {request.uid}: a prompt of {prompt} and an answer of {answer} tokens are more than the "
                f"engine's {max_length}"
            )


_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def parse_output(uid: str, output: Mapping[str, Any], weight_version: int) -> GenerationResult:
    """SGLang's answer as a GenerationResult; tokens and log-probs come from output_token_logprobs, so that they agree.

    Args:
        output: {"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "stop", ...}, "weight_version": "3",
            "output_token_logprobs": [(-0.1, 5, None), (-2.3, 7, None)], ...}}
        weight_version: for a request that was aborted before it began and has none of its own.
    """
    meta = output["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    version = str(meta.get("weight_version", ""))
    return GenerationResult(
        uid=uid,
        response_ids=np.array([token for _, token, *_ in pairs], dtype=np.int64),
        logprobs=np.array([logprob for logprob, *_ in pairs], dtype=np.float32),
        finish_reason=_FINISH_REASONS[meta["finish_reason"]["type"]],
        weight_version=int(version) if version.isdigit() else weight_version,
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


# ------------------------------------------------------------------------------------------------ the host process


@contextlib.contextmanager
def _environment(options: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for SGLang while it starts its processes; what the user has set wins."""
    added = {name: value for name, value in options.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _ignore_child_failure(signum: int, frame: Any) -> None:
    """In place of SGLang's handler, which kills this process: the next call finds the dead scheduler and says so."""


@contextlib.contextmanager
def _host_logging(log_file: str | None) -> Iterator[None]:
    """SGLang starts: its children inherit a log file as stdout and stderr, and this process keeps its logging.

    SGLang replaces the root logger's handlers, here too; they are put back.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with contextlib.ExitStack() as stack:
        if log_file is not None:
            os.makedirs(os.path.dirname(os.path.abspath(log_file)), exist_ok=True)
            target = stack.enter_context(open(log_file, "a", encoding="utf-8", buffering=1))
            stack.enter_context(_descriptors_to(target.fileno()))
            stack.enter_context(contextlib.redirect_stdout(target))
            stack.enter_context(contextlib.redirect_stderr(target))
        try:
            yield
        finally:
            root.handlers[:], root.level = handlers, level


@contextlib.contextmanager
def _descriptors_to(target: int) -> Iterator[None]:
    """stdout and stderr of this process and of those that it starts go to another file descriptor."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(target, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


def _require_success(answer: Any) -> None:
    """SGLang answers (success, message), or an object with both, or nothing."""
    if answer is None:
        return
    success, message = answer if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise RuntimeError(f"SGLang refused the weight update: {message}")


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _is_worker(process: psutil.Process) -> bool:
    """Whether a child is one of SGLang's, and not multiprocessing's resource tracker, which may end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "resource_tracker" not in " ".join(process.cmdline())
    return False


def _close_sockets(*owners: Any) -> None:
    """Drop ZeroMQ's unsent messages: it would wait for ever to give them to a dead scheduler when it is collected."""
    import zmq

    held = [value for owner in owners if owner is not None for value in vars(owner).values()]
    for value in held:
        if isinstance(value, zmq.Socket) and not value.closed:
            value.context.destroy(linger=0)


def _socket_files(port_args: Any) -> Iterator[str]:
    """The files of SGLang's ZeroMQ sockets, which it leaves in the temporary folder."""
    for value in vars(port_args).values() if port_args is not None else ():
        if isinstance(value, str) and value.startswith("ipc://"):
            yield value.removeprefix("ipc://")
