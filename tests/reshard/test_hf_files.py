"""Hugging Face folders: read by slices, written by shards, in one process and over gloo."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from harness import run
from safetensors.torch import load_file, save_file
from simulated import CPU, Parameters, allocate, assert_equal, execute, on_every_rank, receive
from tiny_models import megatron, tiny_config

from megarl.model.families import declare
from megarl.parallel.topology import RankGrid
from megarl.reshard import hf_files
from megarl.reshard.executor import Executor
from megarl.reshard.hf_files import FileSaver
from megarl.reshard.layout import Layout
from megarl.reshard.layouts import hf_files_layout, hf_layout, megatron_layout, sglang_layout
from megarl.reshard.plan import ReshardPlan, plan

BUCKET = 4096


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], str]:
    """(tied, several files) -> a folder that transformers wrote."""
    made = {}
    for tied in (True, False):
        torch.manual_seed(int(tied))
        model = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen2", tied))
        for name, parameter in model.named_parameters():  # transformers starts norms at 1 and biases at 0
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
        for several in (True, False):
            folder = str(tmp_path_factory.mktemp(f"tied{tied}several{several}"))
            model.save_pretrained(folder, max_shard_size=20_000 if several else "1GB")
            assert os.path.exists(os.path.join(folder, hf_files.INDEX)) == several
            made[tied, several] = folder
    return made


def read(folder: str) -> Parameters:
    return {n: t for path in sorted(set(hf_files.tensor_files(folder).values())) for n, t in load_file(path).items()}


def load_all(folder: str, target: Layout, tied: bool, dtype: torch.dtype = torch.float32) -> list[Parameters]:
    held = allocate(target, dtype)
    source = hf_layout(declare(tiny_config("qwen2", tied)))
    for rank, own in enumerate(held):
        hf_files.load(folder, target, rank, own, source)
    return held


def save_all(made: ReshardPlan, held: list[Parameters], folder: str, dtype: torch.dtype = torch.float32) -> list[str]:
    count = len(held)
    names = on_every_rank(count, lambda rank: FileSaver(made, dtype, rank, count, CPU, None).save(folder, held[rank]))
    hf_files.write_index(folder, made.target, made.itemsize)
    return [name for own in names for name in own]


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_folder_of_each_family_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    """What transformers wrote, through four Megatron ranks; transformers reads what they write."""
    config = tiny_config(family, **({"mlp_only_layers": [1]} if family == "qwen3_moe" else {}))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    source, saved = str(tmp_path / "source"), str(tmp_path / "saved")
    model.save_pretrained(source)
    declaration = declare(config)
    experts = {"expert": 2, "expert_tensor": 2} if declaration.num_experts else {}
    middle, _ = megatron(declaration, tensor=2, data=2, **experts)
    held = allocate(middle, torch.float32)
    for rank, own in enumerate(held):
        hf_files.load(source, middle, rank, own, hf_layout(declaration))
    save_all(plan(middle, hf_files_layout(declaration, 2), 4, bucket_bytes=BUCKET), held, saved)
    assert_equal(read(saved), read(source))
    hf_files.copy_companions(source, saved)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("several", [True, False], ids=["several files", "one file"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_folder_comes_back_bit_for_bit(
    folders: dict, tensor: int, pipeline: int, tied: bool, several: bool, tmp_path: Path
) -> None:
    declaration = declare(tiny_config("qwen2", tied))
    middle, _ = megatron(declaration, tensor=tensor, pipeline=pipeline)
    held = load_all(folders[tied, several], middle, tied)
    files = hf_files_layout(declaration, 3 if several else 1)
    names = save_all(plan(middle, files, 4, bucket_bytes=BUCKET), held, str(tmp_path))
    assert sorted(names) == [hf_files.file_name(i, files.num_ranks) for i in range(files.num_ranks)]
    assert sorted(os.listdir(tmp_path)) == sorted(names + [hf_files.INDEX] * several)
    assert_equal(read(str(tmp_path)), read(folders[tied, several]))


@pytest.mark.parametrize("several", [True, False], ids=["several files", "one file"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_what_is_saved_and_gives_equal_logits(
    folders: dict, tied: bool, several: bool, tmp_path: Path
) -> None:
    declaration = declare(tiny_config("qwen2", tied))
    middle, _ = megatron(declaration, tensor=2, pipeline=2)
    held = load_all(folders[tied, not several], middle, tied)
    save_all(plan(middle, hf_files_layout(declaration, 3 if several else 1), 4), held, str(tmp_path))
    hf_files.copy_companions(folders[tied, not several], str(tmp_path))
    tokens = torch.arange(20).view(2, 10)
    logits = []
    for folder in (folders[tied, several], str(tmp_path)):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def test_a_bf16_file_fills_fp32_parameters_and_comes_back(folders: dict, tmp_path: Path) -> None:
    declaration = declare(tiny_config("qwen2", True))
    halves = {name: tensor.bfloat16() for name, tensor in read(folders[True, False]).items()}
    save_file(halves, tmp_path / hf_files.SINGLE)
    middle, _ = megatron(declaration, tensor=2)
    held = load_all(str(tmp_path), middle, tied=True)
    assert all(tensor.dtype == torch.float32 for own in held for tensor in own.values())
    back = tmp_path / "back"
    save_all(plan(middle, hf_files_layout(declaration, 1), 2), held, str(back), torch.bfloat16)
    assert_equal(read(str(back)), halves)


def test_companions_are_copied_and_weights_are_not(folders: dict, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders[True, True], source)
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja", "pytorch_model.bin.index.json", "notes.md"):
        (source / name).write_text("{}")
    target = tmp_path / "target"
    hf_files.copy_companions(str(source), str(target), change=lambda config: {**config, "dtype": "bfloat16"})
    expected = ["chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "tokenizer.json"]
    assert sorted(os.listdir(target)) == expected
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, target))
    assert after == {**before, "dtype": "bfloat16"}


def test_files_are_hosted_by_processes_in_turn() -> None:
    declaration = declare(tiny_config())
    middle, _ = megatron(declaration, tensor=2)
    for count, expected in ((1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1])):
        made = plan(middle, hf_files_layout(declaration, count), 4)
        assert list(FileSaver(made, torch.float32, 0, 2, CPU, None).executor.hosts) == expected


# ------------------------------------------------------------------------------------------------ broken folders


def change_file(folders: dict, tmp_path: Path, change: Any) -> str:
    tensors = read(folders[False, False])
    change(tensors)
    save_file(tensors, tmp_path / hf_files.SINGLE)
    return str(tmp_path)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"tensor {Q} \[16, 16\] is missing"),
        (lambda t: t.update({Q: torch.zeros(16, 8)}), rf"tensor {Q} is \[16, 8\], the model needs \[16, 16\]"),
        (lambda t: t.update({Q: torch.zeros(256)}), rf"tensor {Q} is \[256\], the model needs \[16, 16\]"),
        (lambda t: t.update(extra=torch.zeros(3)), r"tensor extra \[3\] is not part of the model"),
    ],
    ids=["missing", "misshapen", "flat", "extra"],
)
def test_a_wrong_tensor_is_named(folders: dict, tmp_path: Path, change: Any, message: str) -> None:
    folder = change_file(folders, tmp_path, change)
    middle, _ = megatron(declare(tiny_config("qwen2")))
    with pytest.raises(ValueError, match=message):
        load_all(folder, middle, tied=False)


def test_tensors_that_the_model_derives_are_ignored(folders: dict, tmp_path: Path) -> None:
    """A rotary table anywhere, and an output layer where the model is tied."""
    tensors = read(folders[True, False])
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / hf_files.SINGLE)
    middle, _ = megatron(declare(tiny_config("qwen2", True)))
    expected = load_all(folders[True, False], middle, tied=True)
    assert_equal(load_all(str(tmp_path), middle, tied=True)[0], expected[0])


def test_a_truncated_file_is_named(folders: dict, tmp_path: Path) -> None:
    whole = Path(folders[False, False], hf_files.SINGLE).read_bytes()
    middle, _ = megatron(declare(tiny_config("qwen2")))
    for size in (len(whole) - 4, 100, 0):
        (tmp_path / hf_files.SINGLE).write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*; copy or download it again"):
            load_all(str(tmp_path), middle, tied=False)


def test_a_file_of_the_index_that_is_missing_is_named(folders: dict, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[False, True], folder)
    os.remove(hf_files.tensor_files(str(folder))["lm_head.weight"])
    middle, _ = megatron(declare(tiny_config("qwen2")))
    with pytest.raises(ValueError, match=r"model-0000\d-of-0000\d\.safetensors cannot be read: No such file"):
        load_all(str(folder), middle, tied=False)


def test_a_tensor_that_is_not_in_the_file_that_the_index_names_is_missing(folders: dict, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[False, True], folder)
    index = json.loads((folder / hf_files.INDEX).read_text())
    index["weight_map"][Q] = index["weight_map"]["lm_head.weight"]
    assert index["weight_map"][Q] != index["weight_map"]["model.layers.1.self_attn.k_proj.weight"]
    (folder / hf_files.INDEX).write_text(json.dumps(index))
    middle, _ = megatron(declare(tiny_config("qwen2")))
    with pytest.raises(ValueError, match=rf"tensor {Q} \[16, 16\] is missing"):
        load_all(str(folder), middle, tied=False)


def test_a_folder_without_weights_says_what_is_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors and no model\.safetensors\.index\.json in"):
        hf_files.tensor_files(str(tmp_path))


def test_a_failed_save_leaves_no_file_under_the_final_name(
    folders: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(tensors: Parameters, path: str, metadata: dict) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    declaration = declare(tiny_config("qwen2", True))
    middle, _ = megatron(declaration)
    held = load_all(folders[True, False], middle, tied=True)
    monkeypatch.setattr(hf_files, "save_file", torn)
    with pytest.raises(OSError, match="disk full"):
        save_all(plan(middle, hf_files_layout(declaration, 1), 4), held, str(tmp_path))
    assert hf_files.SINGLE not in os.listdir(tmp_path)


# ------------------------------------------------------------------------------------------------ gloo


def save_over_gloo(grid: RankGrid, source: str, folder: str, num_files: int, tied: bool) -> list[str]:
    declaration = declare(tiny_config("qwen2", tied))
    middle = megatron_layout(declaration, grid, 8, fused_norms=False)
    rank = dist.get_rank()
    own = allocate(middle, torch.float32)[rank]
    hf_files.load(source, middle, rank, own, hf_layout(declaration))
    made = plan(middle, hf_files_layout(declaration, num_files), 4, bucket_bytes=BUCKET)
    names = FileSaver(made, torch.float32, rank, grid.num_ranks, CPU, dist.group.WORLD).save(folder, own)
    if rank == 0:
        hf_files.write_index(folder, made.target, 4)
    return names


@pytest.mark.parametrize(
    ("sizes", "num_files", "tied"),
    [
        ({"tensor": 2}, 1, True),
        ({"pipeline": 2}, 3, False),
        ({"tensor": 2, "pipeline": 2}, 3, True),
        ({"pipeline": 2, "first_stage_layers": 1}, 3, True),
        ({"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1}, 2, False),
    ],
)
def test_saving_over_gloo_writes_the_same_bytes_as_in_one_process(
    folders: dict, sizes: dict[str, int], num_files: int, tied: bool, tmp_path: Path
) -> None:
    declaration = declare(tiny_config("qwen2", tied))
    middle, grid = megatron(declaration, **sizes)
    together, alone = tmp_path / "gloo", tmp_path / "alone"
    run(save_over_gloo, grid.num_ranks, grid, folders[tied, True], str(together), num_files, tied, deadline=30.0)
    made = plan(middle, hf_files_layout(declaration, num_files), 4, bucket_bytes=BUCKET)
    save_all(made, load_all(folders[tied, True], middle, tied), str(alone))
    assert sorted(os.listdir(together)) == sorted(os.listdir(alone))
    for name in os.listdir(alone):
        assert (together / name).read_bytes() == (alone / name).read_bytes(), name
    assert_equal(read(str(together)), read(folders[tied, True]))


def exchange_over_gloo(made: ReshardPlan, source: list[Parameters], hosts: list[int]) -> list[dict[str, Any]]:
    """All processes host the target ranks of `hosts`; returns the parameters of those that this process hosts."""
    rank = dist.get_rank()
    own = Executor(made, torch.float32, rank, hosts, CPU, dist.group.WORLD)
    arrived = allocate(made.target, torch.float32)
    receive(own, source[rank] if rank < len(source) else {}, arrived)
    return [{n: t.numpy() for n, t in arrived[at].items()} for at in own.targets()]


@pytest.mark.parametrize(
    "hosts",
    [[0, 1, 2, 3], [3, 3, 1, 0], [4, 5, 4, 2]],
    ids=["one each", "two on one process", "processes that only receive"],
)
def test_exchange_over_gloo_brings_what_the_simulation_brings(folders: dict, hosts: list[int]) -> None:
    declaration = declare(tiny_config("qwen2", True))
    source, _ = megatron(declaration, tensor=2, pipeline=2)
    target = sglang_layout(declaration, 2, 2, 64)
    held = load_all(folders[True, False], source, tied=True)
    made = plan(source, target, 4, bucket_bytes=BUCKET)
    assert len(made.buckets) > 2
    expected = allocate(target, torch.float32)
    execute(made, torch.float32, held, expected)
    results = run(exchange_over_gloo, max(3, *hosts) + 1, made, held, hosts, deadline=30.0)
    for process, found in enumerate(results):
        targets = [t for t, host in enumerate(hosts) if host == process]
        for at, parameters in zip(targets, found, strict=True):
            assert_equal({n: torch.from_numpy(v) for n, v in parameters.items()}, expected[at], f"target {at}")
