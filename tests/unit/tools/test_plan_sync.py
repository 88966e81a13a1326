"""The tool that prints a plan: figures by hand for a model of 4,400 parameters."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from transformers import LlamaConfig

# Embedding and output layer 2 x 64 x 16, two norms and the last one 3 x 16, attention 2 x 16 x 16 + 2 x 8 x 16,
# feed-forward 3 x 32 x 16: 2,048 + 48 + 768 + 1,536 = 4,400.
PARAMETERS = 4400


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / "plan_sync.py"
    spec = importlib.util.spec_from_file_location("plan_sync", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def lines(tool: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    assert tool.main(list(arguments)) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_on_one_gpu_everything_is_local(tool: ModuleType, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines(tool, capsys, model, "--ranks", "1", "--bytes", "4")
    megabytes = f"{PARAMETERS * 4 / 1e6:,.1f} MB"
    assert found["sync"] == (
        f"1 bucket; local {megabytes}, within nodes 0.0 MB, between nodes 0.0 MB (at least 0.0 MB must leave a GPU); "
        f"written {megabytes}; largest bucket {megabytes} a GPU"
    )
    assert found["trainer"] == "megatron tp1 pp1 cp1 dp1, 1 ranks"


def test_engines_of_their_own_get_everything_from_another_node(
    tool: ModuleType, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas of the whole model, from two tensor-parallel ranks; config.json alone is enough."""
    found = lines(tool, capsys, f"{model}/config.json", "--ranks", "2", "--tensor", "2", "--split", "--bytes", "4000")
    crossing = "local 0.0 MB, within nodes 0.0 MB, between nodes 35.2 MB (at least 35.2 MB must leave a GPU); written"
    assert f"{crossing} 35.2 MB" in found["sync"]


def test_uneven_stages(tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A layer's 2,336 parameters, and 1,024 each of the embedding and the output layer, with 16 of the last norm. Two
    engine ranks share the two stages' GPUs, each wants all: the stages' other parts cross."""
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    sizes = (str(tmp_path), "--ranks", "2", "--pipeline", "2", "--bytes", "1000")
    layer, first, last = 2 * 16 + 768 + 1536, 1024, 1024 + 16
    assert tool.main([*sizes]) == 2
    assert "set first_stage_layers 2 and last_stage_layers 1" in capsys.readouterr().err
    for outer in (("--first-stage-layers", "1"), ("--last-stage-layers", "2")):
        found = lines(tool, capsys, *sizes, *outer)
        everything = (3 * layer + first + last) / 1e3
        assert f"local {everything:.1f} MB, within nodes {everything:.1f} MB" in found["sync"]
        # The first bucket holds all: one GPU packs its stage for the other and receives the whole model.
        assert f"largest bucket {everything + (2 * layer + last) / 1e3:.1f} MB a GPU" in found["sync"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "2", "--tensor", "4"), "tensor 4 x context 1 x pipeline 1 = 4 does not divide 2 ranks"),
        (("--ranks", "2", "--rollout-tensor", "3"), "--rollout-tensor 3 does not divide the 2 engine ranks"),
        (("--ranks", "2", "--engine-ranks", "4"), "4 engine ranks on 2 trainer GPUs"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(
    tool: ModuleType, model: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tool.main([model, *arguments]) == 2
    assert message in capsys.readouterr().err
