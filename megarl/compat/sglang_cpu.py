"""Lets the real SGLang run where there is no GPU: stand-ins for three packages that it imports and does not need there.

For SGLang 0.5.17 to 0.5.21 with torch 2.11 to 2.13. A stand-in comes in only where the real import fails:

* triton: absent from CPU builds of torch. SGLang decorates its kernels on import and calls none with
  attention_backend=torch_native and sampling_backend=pytorch.
* torchvision: PyPI's wheel is built against CUDA torch and cannot be imported with a CPU build ("operator
  torchvision::nms does not exist"). SGLang registers image processors on import and runs none for text.
* sgl_kernel: has no CPU wheel on PyPI, and the CUDA wheel needs a driver to be imported. Nothing in it runs for dense
  Llama, Qwen2, Qwen3 and Qwen3-MoE models on the path above.

A kernel of a stand-in that is called raises NotImplementedError with its name. SGLang spawns its scheduler and
detokenizer processes: `engine_class` gives an Engine whose children install the stand-ins before they import SGLang.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any


def install() -> list[str]:
    """Put a stand-in in place of each package that cannot be imported; the names of the stand-ins that are in place.

    Does nothing where CUDA works. May be called any number of times; must be called before SGLang is imported.
    """
    import torch

    if torch.cuda.is_available():
        return []
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not _importable("triton"):
        _stand_in_for_triton()
    if not _importable("torchvision"):
        _stand_in_for_torchvision()
    if not _importable("sgl_kernel"):
        _stand_in_for_sgl_kernel()
    return [name for name in ("triton", "torchvision", "sgl_kernel") if is_stand_in(name)]


def is_stand_in(package: str) -> bool:
    """Whether a package in this process is one of this module's stand-ins."""
    return isinstance(sys.modules.get(package), StandIn)


def engine_class() -> type[Any]:
    """SGLang's Engine; where CUDA does not work, one that suits a laptop.

    Its scheduler processes install the stand-ins first. It starts no detokenizer process, which would import SGLang for
    7 s and hold 600 MB to do nothing: with skip_tokenizer_init, which it requires, the scheduler answers directly.
    """
    import torch

    install()
    from sglang.srt.entrypoints.engine import Engine

    if torch.cuda.is_available():
        return Engine
    body: dict[str, Any] = {
        "run_scheduler_process_func": staticmethod(
            _ChildMain("sglang.srt.managers.scheduler", "run_scheduler_process")
        ),
        "run_detokenizer_process_func": staticmethod(
            _ChildMain("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process")
        ),
    }
    if hasattr(Engine, "_launch_detokenizer_subprocesses"):
        body["_launch_detokenizer_subprocesses"] = classmethod(lambda cls, *args, **kwargs: ([], []))
    return type("CpuEngine", (Engine,), body)


class _ChildMain:
    """The main function of a spawned process. Unpickling it there, before its arguments, installs the stand-ins."""

    def __init__(self, module: str, function: str) -> None:
        self.module, self.function = module, function
        self.__name__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _load_child_main(self.module, self.function)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _load_child_main, (self.module, self.function)


def _load_child_main(module: str, function: str) -> Callable[..., Any]:
    install()
    return getattr(importlib.import_module(module), function)


def _importable(package: str) -> bool:
    """Whether a package imports, and not as a stand-in's absence; what a failed import left behind is removed."""
    if package in sys.modules:
        return True
    try:
        importlib.import_module(package)
    except Exception:  # a broken binary package raises OSError, RuntimeError or AssertionError as well
        for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
            del sys.modules[name]
        return False
    return True


# ------------------------------------------------------------------------------------------------ the stand-ins


class StandIn(types.ModuleType):
    """A module of which any name can be imported: a class for a capital letter, else a submodule that can be called.

    Called with one function it is a decorator without arguments (@triton.jit), otherwise a decorator's factory
    (@triton.autotune(configs=...)); either way the function becomes a kernel that cannot run.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        value = (
            _stand_in_class(self.__name__, name) if name[0].isupper() else sys.modules.setdefault(full, StandIn(full))
        )
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return _as_kernel(args[0])
        return lambda *inner, **_: _as_kernel(inner[0]) if inner else None


class Kernel:
    """A kernel of a package that is not there: it can be imported, and raises its name when it is launched."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.__name__}: this kernel needs a GPU; without one, SGLang runs on a stand-in that cannot launch it "
            "(megarl.compat.sglang_cpu). Use a model and options that do not need the kernel."
        )


def _as_kernel(function: Any) -> Any:
    """A kernel for a function; classes (@triton.language's structs) and kernels pass through."""
    if isinstance(function, (type, Kernel, StandIn)):
        return function
    return Kernel(f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}")


class _AnyAttribute(type):
    """A class of which every attribute is None: InterpolationMode.BICUBIC and the like."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _stand_in_class(module: str, name: str) -> type:
    return _AnyAttribute(name, (), {"__module__": module, "__init__": lambda self, *args, **kwargs: None})


class _Finder:
    """Finds the submodules of stand-ins: `import triton.language as tl`."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = name.partition(".")[0]
        if package not in ("triton", "torchvision") or not is_stand_in(package):
            return None
        return importlib.machinery.ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """A stand-in has nothing to execute."""


def _place(module: StandIn) -> None:
    sys.modules[module.__name__] = module
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)  # type: ignore[arg-type]


def _stand_in_for_triton() -> None:
    # Let torch find out that there is no triton and remember it: inductor trips over a stand-in.
    import torch._inductor.runtime.triton_compat  # noqa: F401
    from torch.utils import _triton

    _triton.has_triton_package()
    triton = StandIn("triton")
    # Two functions of triton's that are host arithmetic and that SGLang calls outside kernels.
    triton.cdiv = lambda x, y: -(-x // y)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()  # type: ignore[attr-defined]
    _place(triton)


def _stand_in_for_torchvision() -> None:
    # transformers (4.5x to 5.12) must go on believing that torchvision is absent; only its AutoImageProcessor, which
    # SGLang registers classes on, has to resolve.
    from transformers.utils import import_utils

    import_utils.BACKENDS_MAPPING["torchvision"] = (lambda: True, import_utils.BACKENDS_MAPPING["torchvision"][1])
    import_utils.is_torchvision_available()  # cached, before the stand-in is there to be found
    _forget_missing_torchvision()
    _place(StandIn("torchvision"))


def _forget_missing_torchvision() -> None:
    """transformers' lazy modules note what lacks a backend when they are imported, which may have been before."""
    for name, module in list(sys.modules.items()):
        missing = vars(module).get("_object_missing_backend") if name.partition(".")[0] == "transformers" else None
        for attribute, backends in list((missing or {}).items()):
            if backends == ["torchvision"]:
                del missing[attribute]
                vars(module).pop(attribute, None)  # a placeholder, if somebody asked for it


def _stand_in_for_sgl_kernel() -> None:
    # Its submodules stay absent: SGLang imports them where it will use them, and guards those imports.
    module = _SglKernel("sgl_kernel")
    module.__version__ = "0.0.0+megarl.stand_in"
    _place(module)


class _SglKernel(StandIn):
    """Every attribute is a kernel."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"sgl_kernel.{name}")
