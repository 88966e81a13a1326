"""Packaging of megarl: what it is called, what it needs, and which versions were tested together.

Bounds start at the oldest version tested and end before the next release that may break. The exact sets that CI and the
GPU runs use are pinned in constraints/cpu.txt and constraints/gpu.txt; tool settings are in pyproject.toml.
"""

from setuptools import find_packages, setup

# torch 2.11 is the GPU set's, 2.13 the CPU set's: SGLang pins one torch release exactly.
REQUIRES = [
    "jinja2>=3.1.6,<4",
    "math-verify>=0.9,<0.10",
    "megatron-core==0.16.*",
    "numpy>=2.3,<2.5",
    "omegaconf>=2.4,<2.5",
    "psutil>=7.2,<8",
    "pyarrow>=26,<27",
    "ray>=2.60,<3",
    "pyyaml>=6.0.3,<7",
    "rich>=15,<16",
    "safetensors>=0.8,<0.9",
    "tensorboard>=2.21,<3",
    "torch>=2.11,<2.14",
    "transformers>=5.12.1,<5.13",
]

# Transformer Engine's torch extension is compiled against the installed torch, so it is a second command (README), with
# --no-deps: what it imports is here. Its metadata asks for nvidia-cudnn-frontend>=1.29, which needs a newer
# nvidia-cutlass-dsl than SGLang pins; only its fused grouped MLPs use that package, after a look at its version.
GPU = [
    "einops",
    "nvdlfw-inspect",
    "onnx",
    "onnxscript",
    "pydantic",
    "sglang==0.5.17",
    "transformer-engine[core_cu13]==2.20.2",
    "wheel",
]

# What SGLang imports on the CPU. SGLang, xgrammar and apache-tvm-ffi themselves are installed with --no-deps by the
# scripts: their dependency lists pull in CUDA packages that never run there.
SGLANG_CPU = [
    "aiohttp",
    "compressed-tensors",
    "dill",
    "distro",
    "einops",
    "fastapi",
    "gguf",
    "ipython",
    "jsonschema",
    "msgspec",
    "openai==2.6.1",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "regex",
    "requests",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "soundfile==0.13.1",
    "tiktoken",
    "tqdm",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "zstandard",
]

TEST = [
    "hypothesis>=6.170",
    "import-linter>=2.17,<3",
    "mypy>=2.4,<3",
    "pytest>=9.2,<10",
    "pytest-timeout>=2.4,<3",
    "ruff>=0.17.6,<0.18",
]

setup(
    name="megarl",
    version="0.1.0",
    description="RL training of language models with Megatron-Core, SGLang and Ray",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl": ["py.typed"]},
    install_requires=REQUIRES,
    extras_require={"gpu": GPU, "sglang-cpu": SGLANG_CPU, "test": TEST},
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
