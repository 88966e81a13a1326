"""megarl: train language models by reinforcement learning with Megatron-Core, SGLang and Ray."""

__version__ = "0.1.0"
