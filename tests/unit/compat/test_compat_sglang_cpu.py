"""Stand-ins come in only where a real import fails. A process for each case: imports cannot be undone."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")

ROOT = Path(__file__).parents[3]

CASE = """
import torch
from megarl.compat.sglang_cpu import Kernel, install, is_stand_in
if torch.cuda.is_available():
    assert install() == []
    raise SystemExit
{before}
first = install()
assert install() == first, "install is not idempotent"
{after}
from transformers import AutoImageProcessor
assert AutoImageProcessor.register is not None, "SGLang registers image processors when it is imported"
"""


def run(folder, before="", after=""):
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CASE.format(before=before, after=after)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def make_package(folder, name, source):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(source)


def test_broken_packages_are_replaced_and_working_ones_kept(tmp_path):
    # What a CPU build of torch meets with PyPI's torchvision.
    make_package(tmp_path, "torchvision", "from . import half\nraise RuntimeError('operator nms does not exist')")
    (tmp_path / "torchvision" / "half.py").write_text("REAL = True")
    make_package(tmp_path, "sgl_kernel", "REAL = True")
    run(
        tmp_path,
        after="""
import sgl_kernel, torchvision.half, torchvision.transforms.v2.functional
assert is_stand_in("torchvision") and not hasattr(torchvision.half, "__file__")
assert sgl_kernel.REAL and not is_stand_in("sgl_kernel")
""",
    )


def test_a_kernel_that_is_called_says_its_name(tmp_path):
    make_package(tmp_path, "triton", "raise ImportError('not here')")
    make_package(tmp_path, "sgl_kernel", "raise ImportError('not here')")
    run(
        tmp_path,
        before="import transformers; transformers.AutoImageProcessor  # imported before, and asked for",
        after="""
import sgl_kernel, triton
import triton.language as tl
@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["n"])
@triton.jit
def scale(x, n: tl.constexpr): ...
assert isinstance(scale, Kernel)
for call, name in ((lambda: scale[(1,)](3), "scale"), (lambda: sgl_kernel.rmsnorm(3), "sgl_kernel.rmsnorm")):
    try:
        call()
    except NotImplementedError as error:
        assert name in str(error), error
    else:
        raise AssertionError(f"{name} ran")
assert (triton.cdiv(5, 2), triton.next_power_of_2(5), triton.next_power_of_2(8)) == (3, 8, 8)
""",
    )
