"""Folders of weights as the conversion tools take them: a Hugging Face folder, or a Megatron checkpoint and its config.

What a folder holds is known, and checked against its config, before any weight is read.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoConfig

from megarl.config import ParallelConfig
from megarl.engines.stored import is_stored, read_stored
from megarl.model.families import VALUE_HEAD, declare_role
from megarl.model.hf_config import DTYPES, Precision, Role, check_supported
from megarl.model.role_layout import role_layout
from megarl.ops.commands import Steps
from megarl.reshard import hf_files
from megarl.reshard.layout import Layout, Shape
from megarl.workers.weights import compare_parameters, load_role

if TYPE_CHECKING:
    from megarl.engines.megatron import MegatronEngine

HF_SUBFOLDER = "hf"
"""Beside a converted checkpoint: config and tokenizer, so that it can be turned back without the original."""

ROLES: tuple[Role, ...] = ("actor", "critic")

_SAFETENSORS_TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "F64": torch.float64}


@dataclass(frozen=True)
class Weights:
    """A folder of weights whose names and shapes are those of its config."""

    folder: str
    is_hf: bool
    role: Role
    hf_folder: str
    """Where config and tokenizer are; the folder itself where it is a Hugging Face folder."""
    hf_config: Any
    dtypes: frozenset[torch.dtype]

    @property
    def tensors(self) -> Mapping[str, Shape]:
        """The canonical tensors of the role."""
        return declare_role(self.role, self.hf_config).tensors()

    @property
    def kind(self) -> str:
        return "Hugging Face" if self.is_hf else "Megatron"

    def dtype(self) -> torch.dtype:
        """The type of all its tensors.

        Raises:
            ValueError: they have several, or one that the tools do not keep.
        """
        if len(self.dtypes) == 1 and (found := next(iter(self.dtypes))) in DTYPES.values():
            return found
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self.dtypes))
        raise ValueError(f"{self.folder} stores {names}; say which to use: --precision bf16 or --precision fp32")

    def precision(self, asked: Precision | None) -> Precision:
        """What was asked for, else what the files have."""
        names: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
        return asked or names[self.dtype()]


def open_weights(folder: str, hf: str | None = None) -> Weights:
    """Either kind of folder; the role is what its output layer says.

    Raises as `open_hf` and `open_checkpoint`."""
    if os.path.isfile(os.path.join(folder, "config.json")):
        return open_hf(folder)
    return open_checkpoint(folder, hf=hf)


def open_pair(a: str, b: str, hf: str | None = None) -> tuple[Weights, Weights]:
    """Two folders; a checkpoint without a config beside it takes hf, or else the other's."""
    configs = [hf or _config_folder(folder) for folder in (a, b)]
    return open_weights(a, configs[0] or configs[1]), open_weights(b, configs[1] or configs[0])


def _config_folder(folder: str) -> str | None:
    places = (folder, os.path.join(folder, HF_SUBFOLDER))
    return next((place for place in places if os.path.isfile(os.path.join(place, "config.json"))), None)


def open_hf(folder: str, role: Role | None = None) -> Weights:
    """A Hugging Face folder. Without a role: critic where it has a value head. A critic may also be made of a language
    model: its head is then zero.

    Raises:
        ValueError: no config, a model that is not supported, tensors that are missing, misshapen or not known, or a
            file that cannot be read.
        FileNotFoundError: no safetensors.
    """
    folder = os.path.abspath(folder)
    hf_config = read_config(folder)
    files = hf_files.tensor_files(folder)
    found: Role = "critic" if VALUE_HEAD in files else "actor"
    hf_files.check_tensors(folder, declare_role(found, hf_config).tensors())
    if role == "actor" and found == "critic":
        raise ValueError(f"{folder} is a critic's: it has {VALUE_HEAD} and no output layer; use --role critic")
    wanted = declare_role(found, hf_config).tensors()
    dtypes = set()
    for path in sorted({files[name] for name in wanted}):
        with safe_open(path, framework="pt") as opened:
            names = [name for name in opened.keys() if name in wanted]  # noqa: SIM118 (it is no mapping)
            dtypes |= {opened.get_slice(name).get_dtype() for name in names}
    unknown = sorted(dtypes - _SAFETENSORS_TYPES.keys())
    if unknown:
        raise ValueError(f"{folder} stores {', '.join(unknown)}; megarl reads {', '.join(_SAFETENSORS_TYPES)}")
    return Weights(folder, True, role or found, folder, hf_config, frozenset(_SAFETENSORS_TYPES[d] for d in dtypes))


def open_checkpoint(folder: str, role: Role | None = None, hf: str | None = None) -> Weights:
    """A Megatron checkpoint: a converted one, a role's in a run's checkpoint, or that with a role. hf: where config and
    tokenizer are, if not beside it.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: it is not of that role, there is no config, or a file is missing or cut off.
    """
    folder = _role_folder(os.path.abspath(folder), role)
    stored = read_stored(folder)
    found: Role = "critic" if stored.is_critic else "actor"
    if role not in (None, found):
        raise ValueError(f"{folder} is {_a(found)}'s; use --role {found}, or another folder")
    hf_folder = os.path.abspath(hf or os.path.join(folder, HF_SUBFOLDER))
    if hf is None and not os.path.isfile(os.path.join(hf_folder, "config.json")):
        raise ValueError(
            f"{folder} has no {HF_SUBFOLDER}/config.json beside its weights; pass --hf with the Hugging Face folder of "
            "the model (a run's is model.path in its config.yaml)"
        )
    return Weights(folder, False, found, hf_folder, read_config(hf_folder), stored.dtypes)


def _role_folder(folder: str, role: Role | None) -> str:
    if is_stored(folder):
        return folder
    roles = [name for name in ROLES if is_stored(os.path.join(folder, name))]
    if not roles:
        raise FileNotFoundError(
            f"no weights in {folder}: neither config.json (a Hugging Face folder) nor metadata.json (a Megatron "
            f"checkpoint), nor one of the latter in {' or '.join(ROLES)}"
        )
    if role is None and len(roles) > 1:
        raise ValueError(f"{folder} holds {' and '.join(roles)}; say which: --role, or {folder}/{roles[0]}")
    if role is not None and role not in roles:
        raise ValueError(f"{folder} holds {roles[0]}, but no {role}")
    return os.path.join(folder, role or roles[0])


def _a(role: Role) -> str:
    return "an actor" if role == "actor" else "a critic"


def read_config(folder: str) -> Any:
    """
    Raises:
        ValueError: no config.json, one that cannot be read, or a model that is not supported.
    """
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{folder} holds no config.json; give a Hugging Face folder")
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}") from error
    check_supported(hf_config)
    return hf_config


# ------------------------------------------------------------------------------------------------ under Megatron


def choose_parallel(weights: Weights, asked: ParallelConfig | None, num_ranks: int) -> ParallelConfig:
    """The sizes that were asked for; else a split of the model over all ranks: as many pipeline stages as fit, the rest
    tensor parallel.

    Raises:
        ValueError: none fits, or what was asked for does not.
    """
    if asked is not None:
        role_layout(weights.role, weights.hf_config, asked, num_ranks, fused_norms=False)
        return asked
    for pipeline in range(num_ranks, 0, -1):
        if num_ranks % pipeline == 0:
            tensor = num_ranks // pipeline
            expert = math.gcd(tensor, getattr(weights.hf_config, "num_experts", None) or 1)
            split = ParallelConfig(tensor=tensor, pipeline=pipeline, expert=expert, sequence=tensor > 1)
            with contextlib.suppress(ValueError):
                role_layout(weights.role, weights.hf_config, split, num_ranks, fused_norms=False)
                return split
    config = weights.hf_config
    raise ValueError(
        f"no pipeline x tensor split over {num_ranks} processes fits: the model has {config.num_hidden_layers} layers "
        f"and {config.num_key_value_heads} key/value heads; start as many processes as divide one of them, or pass "
        "--pipeline with --first-stage-layers and --last-stage-layers"
    )


@dataclass(frozen=True)
class Model:
    """A role's model under Megatron without an optimizer, on this rank, and where its weights lie."""

    weights: Weights
    engine: MegatronEngine
    layout: Layout
    precision: Precision

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def rank(self) -> int:
        return self.engine.groups.rank

    def __str__(self) -> str:
        tensors = self.layout.tensors
        count = sum(map(math.prod, tensors.values()))
        return f"{self.weights.role} in {self.precision}, {len(tensors)} tensors, {count:,} elements"


def build(weights: Weights, parallel: ParallelConfig, precision: Precision, deadline: float, steps: Steps) -> Model:
    """The model, not yet with its weights. Collective."""
    from megarl.engines.megatron import MegatronEngine

    with steps.waiting("building the model"):
        engine = MegatronEngine(weights.role, weights.hf_config, parallel, precision, timeout=deadline)
        layout = role_layout(weights.role, weights.hf_config, parallel, dist.get_world_size(), engine.uses_fused_norms)
        planned = {name: tuple(shape) for name, shape in layout.shard(engine.groups.rank).parameters.items()}
        actual = {name: tuple(parameter.shape) for name, parameter in engine.parameters().items()}
        compare_parameters(planned, actual, "Megatron")
    return Model(weights, engine, layout, precision)


def read(model: Model, steps: Steps) -> None:
    """Fill the model from its folder. Collective.

    Raises:
        ValueError: a Megatron checkpoint has other tensors than its config says, or cannot be read.
    """
    weights = model.weights
    if not weights.is_hf:
        with steps.waiting(f"reading {weights.folder}"):
            model.engine.load_weights(weights.folder)
        return
    parameters = model.engine.parameters()
    for parameter in parameters.values():
        parameter.zero_()  # what no file has, the vocabulary's padding and a new value head, is the same every time
    with steps.watching(f"reading {weights.folder}", parameters) as watched:
        load_role(weights.role, weights.folder, weights.hf_config, model.layout, model.rank, watched)


# ------------------------------------------------------------------------------------------------ what is written


def check_out(out: str, overwrite: bool, inputs: Sequence[str]) -> None:
    """
    Raises:
        ValueError: the folder holds something and may not be replaced, or replacing it would remove an input.
    """
    real = os.path.realpath(out)
    for path in map(os.path.realpath, inputs):
        if path == real or path.startswith(real + os.sep):
            raise ValueError(f"{out} is, or holds, {path}, which is read; name another folder")
    if os.path.exists(out) and not os.path.isdir(out):
        raise ValueError(f"{out} is a file; name a folder")
    names = sorted(os.listdir(out)) if os.path.isdir(out) else []
    if not names:
        return
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if not overwrite:
        raise ValueError(f"{out} is not empty ({shown}); name another folder, or pass --overwrite to replace it")
    if not {"config.json", "metadata.json"} & set(names):
        raise ValueError(f"{out} holds no weights ({shown}), so --overwrite does not remove it; name another folder")


@contextlib.contextmanager
def written(out: str) -> Iterator[str]:
    """A folder to write into; it takes its name, and the place of what was there, once all ranks are done. Collective.
    After an error it is removed or, at worst, keeps the name OUT.partial."""
    out = os.path.abspath(out)
    partial, is_first = out + ".partial", dist.get_rank() == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
    dist.barrier()
    try:
        yield partial
        dist.barrier()
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_first:
        old = f"{out}.old.{os.getpid()}"
        if os.path.isdir(out) and os.listdir(out):
            os.rename(out, old)
        os.rename(partial, out)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
