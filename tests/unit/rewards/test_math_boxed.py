r"""Is what is in the last \boxed{} right?"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from megarl.rewards import BUILTIN, RewardPool, load_reward, pool
from megarl.rewards.math_boxed import last_boxed, score


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}} {and} more }", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}", None),
        (r"\boxed {7}", "7"),
        (r"\boxed{x_{1_{2}}^{3}}", "x_{1_{2}}^{3}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1 and \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed 5", None),
        ("boxed{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_whole_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


# answer in the box, ground truth, score
CASES = [
    ("5", "5", 1),
    ("6", "5", 0),
    ("5.0", "5", 1),
    ("0.5", r"\frac{1}{2}", 1),
    (r"\frac12", r"\dfrac{1}{2}", 1),
    ("1/3", r"\frac{1}{3}", 1),
    ("0.33", r"\frac{1}{3}", 0),
    (r"\sqrt{12}", r"2\sqrt{3}", 1),
    (r"\sqrt{13}", r"2\sqrt{3}", 0),
    ("(x+1)^2", "x^2 + 2x + 1", 1),
    ("(x-1)^2", "x^2 + 2x + 1", 0),
    ("x = 5", "5", 1),
    ("1,000", "1000", 1),
    (r"(3, \pi/2)", r"\left(3, \frac{\pi}{2}\right)", 1),
    (r"(\pi/2, 3)", r"\left(3, \frac{\pi}{2}\right)", 0),
    ("3, -1", "-1, 3", 1),
    (r"\text{East}", r"\text{east}", 1),
    (r"\text{west}", r"\text{east}", 0),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0),
    ("", "5", 0),
    ("?", "5", 0),
    ("what is this", "what is  that", 0),
]


@pytest.mark.parametrize(("answer", "ground_truth", "expected"), CASES)
def test_equal_is_what_has_the_same_value(answer: str, ground_truth: str, expected: float) -> None:
    assert load_reward("math")("s", rf"So it is $\boxed{{{answer}}}$.", ground_truth, {}) == expected


def test_only_the_last_box_counts_and_without_one_there_is_no_score() -> None:
    assert score("s", r"\boxed{5} \boxed{6}", "5", {}) == 0.0
    assert score("s", r"\boxed{6} \boxed{5}", "5", {}) == 1.0
    assert score("s", "The answer is 5", "5", {}) == 0.0


def test_the_ground_truth_may_be_a_whole_solution() -> None:
    solution = r"We have $\boxed{3}$ apples of 6, so $\boxed{\frac{3}{6}}$ of them."
    assert score("s", r"\boxed{0.5}", solution, {}) == 1.0
    assert score("s", r"\boxed{3}", solution, {}) == 0.0


@pytest.mark.parametrize("ground_truth", ["", " ", r"so \boxed{ }"])
def test_a_ground_truth_without_an_answer_is_an_error(ground_truth: str) -> None:
    with pytest.raises(ValueError, match="has no answer in it"):
        score("s", r"\boxed{5}", ground_truth, {})


def test_it_works_off_the_main_thread_too() -> None:
    """The library's own time limits are signals, which only the main thread may set."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score("s", r"\boxed{0.25}", r"\frac{1}{4}", {})))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_in_the_pool_what_never_ends_is_contained() -> None:
    pool = RewardPool(["math", "gsm8k"], 1, 2.0, 1024)

    def submit(answer: str) -> tuple[float, str | None]:
        return pool.submit("math", ("s", rf"\boxed{{{answer}}}", r"\frac{1}{2}", {})).result(timeout=60)

    try:
        assert "math" not in BUILTIN
        assert submit("0.5") == (1.0, None)
        assert submit("9^{9^{9^9}}") == (0.0, "reward timed out after 2 s")
        assert submit("0.5") == (1.0, None)
        assert submit("0.4") == (0.0, None)
        assert pool.submit("gsm8k", ("s", "#### 8", "8", {})).result(timeout=0) == (1.0, None)
    finally:
        pool.close()


def test_in_the_pool_many_that_never_end_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a user's function the rest would not be tried."""
    monkeypatch.setattr(pool, "GIVE_UP_AFTER", 2)
    own = RewardPool(["math"], 2, 2.0, 1024)
    try:
        answers = ["9^{9^{9^9}}"] * 5 + ["0.5"] * 6
        started = [own.submit("math", ("s", rf"\boxed{{{answer}}}", r"\frac{1}{2}", {})) for answer in answers]
        found = [future.result(timeout=60) for future in started]
    finally:
        own.close()
    assert found == [(0.0, "reward timed out after 2 s")] * 5 + [(1.0, None)] * 6


def test_who_scores_nothing_by_it_does_not_import_it() -> None:
    code = "import sys, megarl.rewards; sys.exit('math_verify' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
