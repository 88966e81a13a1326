import pytest
import torch

from megarl.parallel import device


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_all_is_the_cpu() -> None:
    device.set_device(3)
    device.synchronize()
    device.empty_cache()
    device.reset_peak_memory()
    assert device.device() == torch.device("cpu")
    assert device.backend() == "gloo"
    assert device.memory_statistics() == device.MemoryStatistics(0, 0, 0, 0, None, None)


@pytest.mark.gpu
def test_with_cuda_the_driver_is_asked() -> None:
    device.set_device(0)
    held = torch.zeros(1 << 20, device=device.device())
    statistics = device.memory_statistics()
    assert statistics.allocated >= held.numel() * 4
    assert statistics.total is not None
    assert statistics.free is not None
    assert statistics.free < statistics.total
    with pytest.raises(ValueError, match="has no device"):
        device.set_device(torch.cuda.device_count())
