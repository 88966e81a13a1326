"""tools/hf_to_megatron.py, megatron_to_hf.py and verify_weights.py: what goes there and back is the same to the bit, in
whatever layout; what is wrong is named; nothing half-written is left."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from harness import run
from reference_weights import load, tiny_model
from safetensors.torch import load_file, save_file
from test_engine import ADAM, LAYOUTS, actor_loss, micro_batches
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config import ParallelConfig
from megarl.engines.megatron import MegatronEngine, _drop_unstored_objects
from megarl.engines.stored import Stored, read_stored
from megarl.workers import weights as worker_weights

TOOLS = Path(__file__).parents[2] / "tools"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tools = {name: _load(name) for name in ("hf_to_megatron", "megatron_to_hf", "verify_weights")}  # before the forks


def status(name: str, *arguments: str) -> int:
    return int(tools[name].main([*arguments, "--deadline", "30"]))


def call(num_ranks: int, name: str, *arguments: object) -> list[int]:
    return run(status, num_ranks, name, *map(str, arguments))


def words(captured: pytest.CaptureFixture[str]) -> str:
    """What was printed, without line breaks: those of a table depend on its width."""
    printed = captured.readouterr()
    return " ".join((printed.out + printed.err).split())


def model_folder(folder: Path, kind: str, tied: bool = False, precision: str = "bf16", critic: bool = False) -> Path:
    """A model as transformers saves it, in files of 60 kB, with what stands for a tokenizer."""
    model = tiny_model(kind, tied).to(DTYPES[precision])
    model.save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    if critic:
        tensors = weights_of(folder)
        tensors.pop("lm_head.weight", None)
        tensors["score.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).to(DTYPES[precision])
        for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
            path.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kind", "tied", "critic"),
    [
        ("llama", False, False),
        ("llama", True, False),
        ("qwen2", False, False),
        ("qwen3", True, False),
        ("qwen3_moe", False, False),
        ("qwen2", True, True),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen3-tied", "qwen3_moe", "critic"],
)
def test_there_and_back_is_the_same(kind: str, tied: bool, critic: bool, precision: str, tmp_path: Path) -> None:
    original = model_folder(tmp_path / "hf", kind, tied, precision, critic)
    assert run(there_and_back, 1, tmp_path) == [(0, 0)]
    assert_same_bits(weights_of(tmp_path / "back"), weights_of(original))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (original / "tokenizer.json").read_text()


def there_and_back(folder: Path) -> tuple[int, int]:
    out, (hf, megatron, back) = {}, (str(folder / name) for name in ("hf", "megatron", "back"))
    out["there"] = status("hf_to_megatron", hf, megatron)
    os.rename(hf, hf + ".gone")  # the checkpoint needs no original
    out["back"] = status("megatron_to_hf", megatron, back)
    os.rename(hf + ".gone", hf)
    return out["there"], out["back"]


@pytest.mark.parametrize(
    ("kind", "writers", "readers"),
    [
        ("llama", (1, []), (2, [])),  # 4 layers: two pipeline stages
        ("qwen2", (2, ["--pipeline", "2"]), (1, [])),
        ("qwen3_moe", (2, ["--tensor", "2", "--expert", "2"]), (2, ["--pipeline", "2"])),
        ("llama", (2, ["--pipeline", "2", "--first-stage-layers", "1", "--last-stage-layers", "3"]), (4, [])),
    ],
    ids=["one-pp2", "pp2-one", "tp2ep2-pp2", "uneven-pp4"],
)
def test_the_layouts_of_writer_and_reader_do_not_matter(
    kind: str, writers: Any, readers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_weights, "MAX_FILE_BYTES", 50_000)  # several files, spread over the readers
    original = model_folder(tmp_path / "hf", kind)
    assert set(call(writers[0], "hf_to_megatron", original, tmp_path / "megatron", *writers[1])) == {0}
    assert set(call(readers[0], "megatron_to_hf", tmp_path / "megatron", tmp_path / "back", *readers[1])) == {0}
    assert_same_bits(weights_of(tmp_path / "back"), weights_of(original))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 2


def test_transformers_computes_the_same_with_what_came_back(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "hf", "qwen3_moe", precision="fp32")
    assert run(there_and_back, 1, tmp_path) == [(0, 0)]
    tokens = torch.arange(24)[None] % 90
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (original, tmp_path / "back")]
    with torch.no_grad():
        wanted, found = (model(input_ids=tokens).logits for model in models)
    assert torch.equal(found, wanted)
    assert wanted.std() > 0.1


def test_precision_is_what_is_asked_for(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "hf", "llama", precision="fp32")
    assert call(1, "hf_to_megatron", original, tmp_path / "megatron", "--precision", "bf16") == [0]
    assert read_stored(str(tmp_path / "megatron")).dtypes == {torch.bfloat16}
    assert call(1, "megatron_to_hf", tmp_path / "megatron", tmp_path / "back", "--precision", "fp32") == [0]
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights_of(original).items()}
    assert_same_bits(weights_of(tmp_path / "back"), rounded)
    assert AutoConfig.from_pretrained(tmp_path / "back").dtype == torch.float32
    assert call(1, "megatron_to_hf", tmp_path / "megatron", tmp_path / "narrow") == [0]
    assert AutoConfig.from_pretrained(tmp_path / "narrow").dtype == torch.bfloat16


def test_a_critic_made_of_a_language_model_starts_at_zero(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "hf", "llama")
    assert call(1, "hf_to_megatron", original, tmp_path / "megatron", "--role", "critic") == [0]
    assert call(1, "megatron_to_hf", tmp_path / "megatron", tmp_path / "back") == [0]
    wanted = weights_of(original)
    del wanted["lm_head.weight"]
    assert_same_bits(weights_of(tmp_path / "back"), {**wanted, "score.weight": torch.zeros(1, 32).bfloat16()})


# ------------------------------------------------------------------------------------------------ checkpoints

ALL_LAYERS = {
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
}
DENSE = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
WITH_EXPERTS = {
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.weight",
    "mlp.router.weight",
    "pre_mlp_layernorm.weight",
}
QK_NORMS = {"self_attention.k_layernorm.weight", "self_attention.q_layernorm.weight"}
OUTER = {"decoder.final_layernorm.weight", "embedding.word_embeddings.weight", "output_layer.weight"}


def test_tensors_are_stored_under_transformer_engines_names(tmp_path: Path) -> None:
    """As megatron-core stores the modules of get_gpt_layer_with_transformer_engine_spec: the norms inside the products
    behind them, but apart before experts. So that a GPU loads what a CPU wrote."""
    for kind in ("qwen3", "qwen3_moe"):
        call(1, "hf_to_megatron", model_folder(tmp_path / kind, kind), tmp_path / f"{kind}_megatron")
    dense = {f"decoder.layers.{name}" for name in ALL_LAYERS | QK_NORMS | DENSE}  # layers of one kind are stacked
    assert set(read_stored(str(tmp_path / "qwen3_megatron")).tensors) == dense | OUTER
    routed = {
        f"decoder.layers.{layer}.{name}"
        for layer in range(4)
        for name in ALL_LAYERS | QK_NORMS | (DENSE if layer == 1 else WITH_EXPERTS)
    }
    assert set(read_stored(str(tmp_path / "qwen3_moe_megatron")).tensors) == routed | OUTER


def trained(folder: str, parallel: ParallelConfig, kind: str) -> dict[str, np.ndarray]:
    """A run's checkpoint of one optimizer step; this rank's weights (bf16, as float32)."""
    model = tiny_model(kind)
    engine = MegatronEngine("actor", model.config, parallel, "bf16", optimizer=ADAM, timeout=30)
    load(engine, model.state_dict())
    assert engine.train_step(micro_batches(parallel), actor_loss, 1.0, with_entropy=True).applied
    engine.save(folder)
    return as_arrays(engine)


def as_arrays(engine: MegatronEngine) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in engine.parameters().items()}


def continued(folder: str, parallel: ParallelConfig, kind: str, wanted: list[dict[str, np.ndarray]]) -> None:
    """Weights alone, into an engine that trains: the optimizer starts afresh from them."""
    engine = MegatronEngine("actor", tiny_model(kind).config, parallel, "bf16", optimizer=ADAM, timeout=30)
    engine.load_weights(folder)
    assert not any(inner.optimizer.state for inner in engine.optimizer.chained_optimizers), "no step was made"
    assert engine.train_step(micro_batches(parallel), actor_loss, 0.0, with_entropy=True).applied
    for name, found in as_arrays(engine).items():
        assert np.array_equal(found, wanted[engine.groups.rank][name]), name


@pytest.mark.parametrize(("kind", "layout"), [("qwen2", "pp2"), ("qwen3_moe", "one")])
def test_a_runs_checkpoint_converts_and_its_weights_load_alone(kind: str, layout: str, tmp_path: Path) -> None:
    num_ranks, parallel = LAYOUTS[layout]
    step = tmp_path / "checkpoints" / "step_000010"
    (step / "critic").mkdir(parents=True)
    original = model_folder(tmp_path / "hf", kind)
    wanted = run(trained, num_ranks, str(step / "actor"), parallel, kind)
    assert read_stored(str(step / "actor")).has_optimizer
    assert call(1, "megatron_to_hf", step, tmp_path / "back", "--role", "actor", "--hf", original) == [0]
    assert call(1, "megatron_to_hf", step / "actor", tmp_path / "again", "--hf", original) == [0]
    found = weights_of(tmp_path / "back")
    assert_same_bits(weights_of(tmp_path / "again"), found)
    assert not torch.equal(found["model.norm.weight"], weights_of(original)["model.norm.weight"])
    assert set(run(holds, num_ranks, str(tmp_path / "back"), parallel, kind, wanted)) == {True}
    run(continued, num_ranks, str(step / "actor"), parallel, kind, wanted)


def holds(folder: str, parallel: ParallelConfig, kind: str, wanted: list[dict[str, np.ndarray]]) -> bool:
    """The folder has these weights, by the rules that tests write out by hand."""
    engine = MegatronEngine("actor", tiny_model(kind).config, parallel, "bf16", timeout=30)
    load(engine, AutoModelForCausalLM.from_pretrained(folder).state_dict())
    vocabulary = ("embedding.word_embeddings.weight", "output_layer.weight")  # its padding is nobody's
    for name, found in as_arrays(engine).items():
        rows = slice(90 if name in vocabulary else None)
        if not np.array_equal(found[rows], wanted[engine.groups.rank][name][rows]):
            return False
    return True


def loads_without_extra_states(folder: str) -> None:
    """Modules have states besides their weights, of which Transformer Engine's have more; here none is stored."""
    config = tiny_model("llama").config
    writer = MegatronEngine("actor", config, ParallelConfig(), "bf16", seed=3, timeout=30)
    state = writer._sharded_state
    nothing = Stored("", {}, frozenset(), False)

    def without_objects(**options: Any) -> dict[str, Any]:
        found = state(**options)
        _drop_unstored_objects(found["model"], nothing)
        return found

    writer._sharded_state = without_objects  # type: ignore[method-assign]
    writer.save(folder)
    assert not read_stored(folder).objects
    reader = MegatronEngine("actor", config, ParallelConfig(), "bf16", optimizer=ADAM, seed=4, timeout=30)
    reader.load_weights(folder)
    for name, found in as_arrays(reader).items():
        assert np.array_equal(found, as_arrays(writer)[name]), name
    with pytest.raises(ValueError, match="holds weights but no optimizer to go on from"):
        reader.load(folder)


def test_a_checkpoint_without_the_modules_extra_states_loads(tmp_path: Path) -> None:
    run(loads_without_extra_states, 1, str(tmp_path))


# ------------------------------------------------------------------------------------------------ verifying


def changed(folder: Path, copy: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    """A copy of a folder with one element changed, in one file."""
    tensors = weights_of(folder)
    tensors[name][index] = value
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_changed_element_is_named_with_its_values(
    num_ranks: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, index = "model.layers.2.self_attn.k_proj.weight", (17, 5)
    original = model_folder(tmp_path / "hf", "llama")
    before = float(weights_of(original)[name][index])
    other = changed(original, tmp_path / "other", name, index, 0.5)
    call(1, "hf_to_megatron", original, tmp_path / "megatron")
    call(1, "hf_to_megatron", other, tmp_path / "other_megatron")
    capfd.readouterr()
    for a, b, (first, second) in [
        (original, other, (before, 0.5)),
        (tmp_path / "megatron", other, (before, 0.5)),
        (other, tmp_path / "megatron", (0.5, before)),
        (tmp_path / "megatron", tmp_path / "other_megatron", (before, 0.5)),
    ]:
        assert call(num_ranks, "verify_weights", a, b) == [1] * num_ranks
        printed = words(capfd)
        assert f"{name}: 1 of 1,024 elements first at [17, 5]: {first:.9g} in A, {second:.9g} in B" in printed
        assert "DIFFERENT in 1 tensor, 1 element of 39 tensors, 55,200 elements" in printed
    for a, b in [(original, tmp_path / "megatron"), (tmp_path / "other_megatron", other), (original, original)]:
        assert call(num_ranks, "verify_weights", a, b) == [0] * num_ranks
        assert "equal: 39 tensors, 55,200 elements, compared as bfloat16" in words(capfd)


def test_other_types_are_compared_as_the_narrower_and_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wide = model_folder(tmp_path / "wide", "qwen2", precision="fp32")
    narrow = model_folder(tmp_path / "narrow", "qwen2", precision="bf16")
    assert call(1, "verify_weights", wide, narrow) == [0]
    assert "compared as bfloat16, after casting" in words(capfd)
    assert call(1, "verify_weights", wide, narrow, "--precision", "fp32") == [1]
    assert "compared as float32, after casting" in words(capfd)


def test_other_models_are_no_difference_but_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = [model_folder(tmp_path / kind, kind) for kind in ("llama", "qwen3")]
    assert call(1, "verify_weights", *folders) == [2]
    assert "tensor model.layers.0.self_attn.q_norm.weight is missing in" in words(capfd)


# ------------------------------------------------------------------------------------------------ what is wrong


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    call(1, "hf_to_megatron", model_folder(tmp_path / "hf", "llama"), tmp_path / "megatron")
    return tmp_path / "megatron"


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 6}, "linear_qkv.layer_norm_weight is [4, 32], the model needs [6, 32]"),
        ({"vocab_size": 300}, "embedding.word_embeddings.weight is [128, 32], the model needs [300 and padding, 32]"),
        ({"model_type": "qwen2"}, "decoder.layers.self_attention.linear_qkv.bias [4, 128] is missing"),
        ({"tie_word_embeddings": True}, "output_layer.weight [128, 32] is not part of the model"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=["layers", "vocabulary", "missing", "extra", "refused"],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_of_another_model_names_the_tensor(
    num_ranks: int, fields: dict[str, Any], message: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edit_config(checkpoint / "hf", **fields)
    out = checkpoint.parent / "back"
    assert call(num_ranks, "megatron_to_hf", checkpoint, out) == [2] * num_ranks
    assert message in words(capfd)
    assert not out.exists()
    assert not Path(f"{out}.partial").exists()


def test_a_file_that_is_cut_off_or_gone_is_named(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, path = checkpoint.parent / "back", checkpoint / "__0_1.distcp"
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert call(1, "megatron_to_hf", checkpoint, out) == [2]
    assert "__0_1.distcp has 1,000 bytes, the index counts" in words(capfd)
    path.write_bytes(bytes(len(whole)))  # as long, but empty
    assert call(1, "megatron_to_hf", checkpoint, out) == [2]
    assert f"{checkpoint} cannot be read" in words(capfd)
    path.unlink()
    assert call(1, "verify_weights", checkpoint.parent / "hf", checkpoint) == [2]
    assert "__0_1.distcp is missing" in words(capfd)
    assert not out.exists()


def test_a_hugging_face_folder_without_a_tensor_or_cut_off_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "hf", "llama", critic=True)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)
    assert call(1, "hf_to_megatron", folder, tmp_path / "out") == [2]
    assert "tensor model.layers.1.mlp.up_proj.weight [64, 32] is missing" in words(capfd)
    path.write_bytes(path.read_bytes()[:-100])
    assert call(1, "hf_to_megatron", folder, tmp_path / "out") == [2]
    assert "model.safetensors cannot be read" in words(capfd)
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_or_of_another_role_is_named(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert call(1, "megatron_to_hf", tmp_path / "empty", tmp_path / "out") == [2]
    assert "no weights in" in words(capfd)
    assert call(1, "megatron_to_hf", checkpoint, tmp_path / "out", "--role", "critic") == [2]
    assert "megatron is an actor's; use --role actor" in words(capfd)
    (tmp_path / "step").mkdir()
    (checkpoint / "hf").rename(tmp_path / "aside")
    checkpoint.rename(tmp_path / "step" / "actor")
    assert call(1, "megatron_to_hf", tmp_path / "step", tmp_path / "out", "--role", "critic") == [2]
    assert "step holds actor, but no critic" in words(capfd)
    assert call(1, "megatron_to_hf", tmp_path / "step", tmp_path / "out") == [2]
    assert "pass --hf with the Hugging Face folder" in words(capfd)


def test_a_folder_that_holds_something_is_not_written_into(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert call(1, "megatron_to_hf", checkpoint, tmp_path / "mine") == [2]
    assert "mine is not empty (thesis.txt); name another folder, or pass --overwrite" in words(capfd)
    assert call(1, "megatron_to_hf", checkpoint, tmp_path / "mine", "--overwrite") == [2]
    assert "holds no weights (thesis.txt), so --overwrite does not remove it" in words(capfd)
    assert call(1, "hf_to_megatron", tmp_path / "hf", tmp_path / "hf", "--overwrite") == [2]
    assert "which is read; name another folder" in words(capfd)
    assert call(1, "megatron_to_hf", checkpoint, tmp_path, "--overwrite") == [2]
    assert "which is read; name another folder" in words(capfd)
    other = model_folder(tmp_path / "other", "qwen2")
    assert call(2, "megatron_to_hf", checkpoint, other, "--overwrite") == [0, 0]
    assert_same_bits(weights_of(other), weights_of(tmp_path / "hf"))
    assert sorted(os.listdir(tmp_path)) == ["hf", "megatron", "mine", "other"]


def test_an_error_while_writing_leaves_nothing(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megarl.reshard.hf_files.write_index", full)
    assert call(1, "megatron_to_hf", checkpoint, tmp_path / "hf", "--overwrite") == [2]
    assert "No space left on device" in words(capfd)
    assert sorted(os.listdir(tmp_path)) == ["hf", "megatron"]
    assert call(1, "verify_weights", tmp_path / "hf", checkpoint) == [0], "what was there before is there still"


def test_processes_over_which_the_model_does_not_split_are_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call(3, "hf_to_megatron", model_folder(tmp_path / "hf", "llama"), tmp_path / "out") == [2, 2, 2]
    assert "no pipeline x tensor split over 3 processes fits: the model has 4 layers and 2 key/value" in words(capfd)


# ------------------------------------------------------------------------------------------------ the command line


def command(*arguments: object, num_ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    name, *rest = map(str, arguments)
    line = [sys.executable, "-W", "ignore", *(launcher if num_ranks > 1 else []), str(TOOLS / f"{name}.py"), *rest]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "hf", "qwen2")
    written = command("hf_to_megatron", original, tmp_path / "megatron", num_ranks=2)
    assert written.returncode == 0, written.stdout + written.stderr
    assert "megatron: actor in bf16, 51 tensors, 43,168 elements; held as megatron tp1 pp2 cp1 dp1" in written.stdout
    verified = command("verify_weights", original, tmp_path / "megatron")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "equal: 51 tensors" in verified.stdout
    refused = command("megatron_to_hf", tmp_path / "megatron", original)
    assert refused.returncode == 2
    assert "is not empty" in refused.stderr
    for tool in tools.values():
        assert "exit status: 0" in tool._parser().format_help()
