"""What the tools that move weights have in common: processes, parallel sizes, progress, errors and exit statuses."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from megarl.config import ParallelConfig
from megarl.parallel import device

EXIT_STATUS = "(torchrun itself ends with 1 whenever a process does not end with 0)"
_SIZES = ("tensor", "pipeline", "expert", "expert_tensor", "first_stage_layers", "last_stage_layers")


class Steps:
    """Bars for the steps of a long job, on rank 0's terminal; on no terminal nothing is shown. Bars go when done."""

    def __init__(self, console: Console, is_shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not is_shown)

    def __enter__(self) -> Steps:
        self._progress.start()
        return self

    def __exit__(self, *unused: Any) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Gives a function that moves the bar on."""
        task = self._progress.add_task(what, total=total)
        yield lambda amount: self._progress.advance(task, amount)
        self._progress.remove_task(task)

    def waiting(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """A step whose length nobody knows."""
        return self.counting(what, None)

    @contextlib.contextmanager
    def watching(self, what: str, parameters: Mapping[str, torch.Tensor]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Gives the same parameters; the bar moves on by each that is looked up for the first time."""
        with self.counting(what, sum(p.nbytes for p in parameters.values())) as advance:
            yield _Watched(parameters, advance)


class _Watched(Mapping[str, torch.Tensor]):
    def __init__(self, parameters: Mapping[str, torch.Tensor], advance: Callable[[int], None]) -> None:
        self._parameters, self._advance, self._seen = parameters, advance, set[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        if name not in self._seen:
            self._seen.add(name)
            self._advance(parameter.nbytes)
        return parameter

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def torchrun_rank() -> int:
    """This process's rank as torchrun says; 0 without it."""
    return int(os.environ.get("RANK", 0))


def join(deadline: float) -> None:
    """Join torch.distributed as torchrun says, alone without it; nothing where it is joined already. deadline: seconds
    of an exchange."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    device.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if not dist.is_initialized():
        store = dist.HashStore() if world == 1 else None  # alone: no port is needed
        limit = timedelta(seconds=deadline)
        dist.init_process_group(device.backend(), store=store, rank=torchrun_rank(), world_size=world, timeout=limit)


def run(work: Callable[[Steps, Console], int], deadline: float) -> int:
    """Join torch.distributed (see `join`) and work. Gives the exit status: the work's own, or 2 for an error, which is
    printed."""
    rank = torchrun_rank()
    out, errors = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        join(deadline)
        with Steps(errors, is_shown=rank == 0 and errors.is_terminal) as steps, warnings.catch_warnings():
            warnings.filterwarnings("ignore")  # Megatron's of what it will do otherwise one day, by the dozen
            return work(steps, out)
    except (ValueError, OSError, RuntimeError) as error:
        errors.print(f"{f'rank {rank}: ' if rank else ''}error: {error}", markup=False)
        return 2


def leave(status: int) -> None:
    """End the process at once: gloo's own teardown waits for ranks that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """The sizes of the layout in which the model is held meanwhile; the files do not depend on it."""
    group = parser.add_argument_group(
        "under torchrun", "how the model is held meanwhile; default: pipeline stages, then tensor parallel, as they fit"
    )
    for name in _SIZES:
        least = 0 if name.endswith("_layers") else 1
        group.add_argument(f"--{name.replace('_', '-')}", type=at_least(least), metavar="N")
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds for an exchange; default 1800")


def asked_parallel(options: argparse.Namespace) -> ParallelConfig | None:
    """The sizes that were given; None: none was."""
    given = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    return ParallelConfig(**given, sequence=given.get("tensor", 1) > 1) if given else None


def at_least(least: int) -> Callable[[str], int]:
    """For argparse's type: a whole number that is no less."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number
