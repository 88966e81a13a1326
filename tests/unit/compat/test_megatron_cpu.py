import os
import subprocess
import sys

import pytest
import torch

from megarl.compat import megatron_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the rewriting is for machines without CUDA")


@pytest.mark.parametrize(
    ("source", "rewritten"),
    [
        ("x = y.cuda()", "x = y"),
        ("x = y.cuda(torch.cuda.current_device()).float()", "x = y.float()"),
        ("torch.zeros(1, device='cuda')", "torch.zeros(1, device='cpu')"),
        ('torch.device("cuda")', 'torch.device("cpu")'),
        ("assert g.type() == 'torch.cuda.FloatTensor'", "assert g.type() == 'torch.FloatTensor'"),
        ("torch.cuda.current_device()", "__megarl_cpu_cuda__.current_device()"),
        ("torch.cuda.is_available()", "torch.cuda.is_available()"),
        ("torch.cuda.current_devices", "torch.cuda.current_devices"),
        ("device = 'cuda:0'", "device = 'cuda:0'"),
    ],
)
def test_rules(source: str, rewritten: str) -> None:
    assert megatron_cpu.rewrite(source) == rewritten


def in_fresh_process(script: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)


def test_megatron_imported_first_is_an_error_that_says_what_to_do() -> None:
    done = in_fresh_process("import megatron.core\nfrom megarl.compat.megatron_cpu import install\ninstall()")
    assert done.returncode != 0
    assert "RuntimeError: megatron.core was imported before" in done.stderr
    assert "call install() first" in done.stderr


def test_install_twice_is_install_once() -> None:
    megatron_cpu.install()
    finders = list(sys.meta_path)
    megatron_cpu.install()
    assert sys.meta_path == finders
    assert sum(isinstance(finder, megatron_cpu._Finder) for finder in finders) == 1


def test_a_traceback_points_at_the_installed_source() -> None:
    megatron_cpu.install()
    from megatron.core import parallel_state

    code = parallel_state.initialize_model_parallel.__code__
    with open(code.co_filename) as file:
        assert "def initialize_model_parallel(" in file.read().split("\n")[code.co_firstlineno - 1]


def test_torch_itself_is_left_alone() -> None:
    megatron_cpu.install()
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


def test_the_random_tracker_forks_the_cpu_generator() -> None:
    megatron_cpu.install()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("ours", 5)
    torch.manual_seed(1)
    with tracker.fork("ours"):
        inside = torch.rand(3)
    outside = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), outside), "the default generator does not notice the fork"
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), inside)


def test_results_of_a_checkpoint_need_no_other_process() -> None:
    megatron_cpu.install()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results = filesystem_async._get_write_results_queue()
    results.put({0: "written"})
    assert filesystem_async._get_write_results_queue().get_nowait() == {0: "written"}
    assert type(results).__module__ in ("queue", "_queue")


def test_names_that_need_transformer_engine_exist() -> None:
    megatron_cpu.install()
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils

    assert megatron_random.FP8GlobalStateManager.is_fp8_enabled() is False
    assert moe_utils.te_general_gemm is None


def test_parameters_of_experts_are_marked_and_no_others() -> None:
    """What the marks do to gradients and their norm is seen in tests/distributed/test_moe.py (etp2, tp2)."""
    layer = torch.nn.Module()
    layer.router, layer.experts = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.ModuleDict({"mlp": layer})
    megatron_cpu.mark_expert_parameters(model)
    assert (layer.experts.weight.allreduce, layer.experts.weight.tensor_model_parallel) == (False, True)
    assert not hasattr(layer.router.weight, "allreduce")
