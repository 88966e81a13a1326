"""What a reward model reads, token by token, and the sum of its score and the rule's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from megarl import config
from megarl.data.tiny import write_tiny_tokenizer
from megarl.rewards.model import RewardTokens, combined_scores, passes_tokens
from megarl.types import Sample, SampleInfo
from tests.reward_models import ALPHABET, TEMPLATE

MESSAGES = [{"role": "user", "content": "3+5="}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Token 1 ends an answer, 4 to 13 are the digits, 14 is +, 15 is =."""
    return AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path_factory.mktemp("policy"), "0123456789+="))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = AutoTokenizer.from_pretrained(write_tiny_tokenizer(tmp_path_factory.mktemp("own"), ALPHABET))
    found.chat_template = TEMPLATE
    return found


def sample(content: Any = MESSAGES, response: tuple[int, ...] = (12, 1), name: str = "0-7/0") -> Sample:
    """3+5= and the answer 8, ended, in the policy's tokens."""
    length = len(response)
    return Sample(
        uid=name,
        group="0-7",
        prompt_ids=np.array([7, 14, 9, 15]),
        response_ids=np.array(response, np.int64),
        rollout_logprobs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, np.bool_),
        weight_versions=np.zeros(length, np.int64),
        score=0.0,
        finish_reason="stop",
        data_source="s",
        prompt_content=content,
    )


def read(tokens: RewardTokens, *samples: Sample) -> tuple[list[list[int]], int]:
    found, num_truncated = tokens(samples)
    return [own.tolist() for own in found], num_truncated


def test_the_answer_is_one_more_message_in_the_models_own_template(own: Any, policy: Any) -> None:
    """u<3+5=>a<8>, without the policy's end token; a plain prompt is a message of the user."""
    expected = [4, 6, 13, 9, 15, 8, 7, 5, 6, 18, 7]
    tokens = RewardTokens(own, policy, True, 100, 0)
    assert read(tokens, sample(), sample("3+5=")) == ([expected, expected], 0)
    two = [{"role": "assistant", "content": "1"}, *MESSAGES]
    assert read(tokens, sample(two)) == ([[5, 6, 11, 7, *expected]], 0)


def test_without_a_template_contents_and_answer_are_plain_text(own: Any, policy: Any) -> None:
    """3+5=8; what stands in several messages is a line each, and a line's end is no token (3, unknown) of this
    alphabet."""
    tokens = RewardTokens(own, policy, False, 100, 0)
    assert read(tokens, sample(), sample("3+5=")) == ([[13, 9, 15, 8, 18]] * 2, 0)
    assert read(tokens, sample([*MESSAGES, *MESSAGES])) == ([[13, 9, 15, 8, 3, 13, 9, 15, 8, 18]], 0)


def test_plain_text_gets_the_tokens_that_the_tokenizer_adds_and_a_template_does_not(own: Any, policy: Any) -> None:
    asked: list[bool] = []

    class Spy:
        def apply_chat_template(self, chats: Any, tokenize: bool) -> Any:
            return own.apply_chat_template(chats, tokenize=tokenize)

        def __call__(self, texts: Any, add_special_tokens: bool) -> Any:
            asked.append(add_special_tokens)
            return own(texts)

    for applies in (True, False):
        RewardTokens(Spy(), policy, applies, 100, 0)([sample()])
    assert asked == [False, True]


def test_tokens_pass_as_they_are_up_to_the_last_that_is_no_padding(own: Any) -> None:
    """As in transformers, where the score is that of the last token that is no padding."""
    assert read(RewardTokens(own, None, False, 100, None), sample()) == ([[7, 14, 9, 15, 12, 1]], 0)
    assert read(RewardTokens(own, None, False, 100, 0), sample()) == ([[7, 14, 9, 15, 12, 1]], 0)
    assert read(RewardTokens(own, None, False, 100, 1), sample(response=(12, 1, 13, 1, 1))) == (
        [[7, 14, 9, 15, 12, 1, 13]],
        0,
    )


def test_what_is_too_long_loses_its_beginning_and_is_counted(own: Any, policy: Any) -> None:
    """Eleven, eleven and twelve tokens."""
    samples = sample(), sample(), sample(response=(12, 13, 1))
    tokens, num_truncated = read(RewardTokens(own, policy, True, 11, 0), *samples)
    assert (tokens[0], tokens[2]) == ([4, 6, 13, 9, 15, 8, 7, 5, 6, 18, 7], [6, 13, 9, 15, 8, 7, 5, 6, 18, 19, 7])
    assert num_truncated == 1
    assert read(RewardTokens(own, policy, True, 4, 0), *samples)[1] == 3
    assert RewardTokens(own, policy, True, 4, 0)([]) == ([], 0)


def test_nothing_to_read_is_an_error_that_names_the_sample(own: Any, policy: Any) -> None:
    tokens = RewardTokens(own, policy, False, 100, 0)
    with pytest.raises(ValueError, match="nothing to read of 1 of 2 answers, the first is 0-7/3"):
        tokens([sample(), sample("", (1,), "0-7/3")])


def test_only_the_policys_own_tokenizer_lets_its_tokens_pass(tmp_path: Path) -> None:
    same, copied, other = tmp_path / "same", tmp_path / "copied", tmp_path / "other"
    for folder, alphabet in ((same, "ab"), (copied, "ab"), (other, "ba")):
        write_tiny_tokenizer(folder, alphabet)
        (folder / "config.json").write_text("{}")

    def passes(path: Path, applies: bool = False, **own: Any) -> bool:
        made = config.build(
            {
                "model": {"path": str(same)},
                "data": {"create": {}},
                "reward_model": {"path": str(path), "apply_chat_template": applies, **own},
            }
        )
        return passes_tokens(made)

    assert (passes(same), passes(copied), passes(other)) == (True, True, False)
    assert (passes(same, True), passes(other, tokenizer_path=str(copied))) == (False, True)
    (same / "tokenizer.json").unlink()
    assert (passes(same), passes(copied)) == (True, False)


# ------------------------------------------------------------------------------------------------ scores


def info(score: float, penalty: float = 0.0, name: str = "0-0/0") -> SampleInfo:
    return SampleInfo(name, "0-0", 2, 2, 2, score, "stop", "s", 0, penalty=penalty)


def test_scores_add_up_by_their_weights_and_a_penalty_counts_whole() -> None:
    """The second's rule gave 0.5, less 0.25 for its length: 0.25 x 0.5 + 2 x -1 - 0.25."""
    infos = [info(1.0), info(0.25, -0.25)]
    assert infos[1].rule_score == 0.5
    assert combined_scores(infos, [3.0, -1.0], 2.0, 0.25) == [6.25, -2.125]
    assert combined_scores(infos, [3.0, -1.0], 1.0, 0.0) == [3.0, -1.25]


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_score_that_is_no_number_stops_the_run(wrong: float) -> None:
    with pytest.raises(ValueError, match="not finite for 1 of 2 answers, the first is 0-0/1"):
        combined_scores([info(0.0), info(0.0, name="0-0/1")], [1.0, wrong], 1.0, 1.0)
