"""What SGLang 0.5.21 lacks for data-parallel attention without a GPU, for tests of its layout and its answers.

Two things: the process that hands requests to the groups of ranks imports SGLang without the stand-ins of
megarl.compat.sglang_cpu and starts the schedulers, so it gets a main function that installs them first; and the
torch_native attention backend does not say by which length a batch is padded.
"""

from __future__ import annotations

from typing import Any

from megarl.compat import sglang_cpu


class ChildMain:
    """The main function of a spawned process, that unpickling installs the stand-ins for."""

    def __init__(self, load: Any) -> None:
        self.load, self.__name__ = load, load.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return self.load, ()


def install(monkeypatch: Any) -> None:
    """For the engines of this process."""
    sglang_cpu.install()
    from sglang.srt.entrypoints import engine

    monkeypatch.setattr(engine, "run_data_parallel_controller_process", ChildMain(controller_main))


def controller_main() -> Any:
    sglang_cpu.install()
    from sglang.srt.managers.data_parallel_controller import run_data_parallel_controller_process

    def run(**arguments: Any) -> None:
        schedulers = {"run_scheduler_process_func": ChildMain(scheduler_main)}
        run_data_parallel_controller_process(**(arguments | schedulers))

    return run


def scheduler_main() -> Any:
    sglang_cpu.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.scheduler import run_scheduler_process

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
    return run_scheduler_process
