"""From rewards to advantages: GAE per token, with a critic; REINFORCE++ per token, without; the others per sequence, in
a group; whitening.

Everything here is a constant to the optimiser: no gradient flows out of this file.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def token_rewards(score: float, kl_penalty: Tensor | None, loss_mask: Tensor, kl_coef: float) -> Tensor:
    """The reward of each token of one sequence: the score at the last loss token, less the KL penalty on each.

        r_t = score * [t is the last loss token] - kl_coef * kl_penalty_t        on loss tokens, 0 elsewhere

    DeepSeekMath (arXiv 2402.03300), equation 2.

    Args:
        kl_penalty: [R] per-token KL estimate (kl.py), or None for no penalty.
        loss_mask: [R] bool.

    Returns:
        [R], in kl_penalty's dtype, float32 without one. All 0 when no token has a loss: there is nothing to credit.

    Raises:
        ValueError: shapes that differ; a mask that is not bool.

    >>> token_rewards(1.0, torch.tensor([0.5, 9.0, 0.25, 9.0]), torch.tensor([True, False, True, False]), kl_coef=0.1)
    tensor([-0.0500,  0.0000,  0.9750,  0.0000])
    """
    _check_mask(loss_mask, kl_penalty=kl_penalty)
    if kl_penalty is None:
        rewards = torch.zeros(loss_mask.shape, dtype=torch.float32, device=loss_mask.device)
    else:
        rewards = torch.where(loss_mask, -kl_coef * kl_penalty.detach(), 0.0)
    positions = loss_mask.nonzero()
    if len(positions):
        rewards[positions[-1]] += score
    return rewards


def gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized Advantage Estimation of one sequence.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        R_t     = A_t + V_t

    High-Dimensional Continuous Control Using Generalized Advantage Estimation (arXiv 1506.02438), equation 16. After
    the last loss token the episode is over: V and A are 0 there, also where the answer was cut at the length limit (as
    in verl).

    t+1 is the next *loss* token. Tokens that the policy did not write (loss_mask False, a tool's observation) are
    stepped over as if they were not there: their rewards and values count for nothing, no discount is taken for them,
    and the token before an observation bootstraps from the one after it. This is verl's multi-turn rule.

    Args:
        rewards: [R], see `token_rewards`.
        values: [R], the critic's prediction before each token is written.
        loss_mask: [R] bool.

    Returns:
        (advantages [R], returns [R]), 0 where the mask is False; float32, or float64 when an input is.

    Raises:
        ValueError: shapes that differ; a mask that is not bool; gamma or lam outside [0, 1].

    >>> rewards, values, loss_mask = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 9.0, 0.25]), [True, False, True]
    >>> advantages, returns = gae(rewards, values, torch.tensor(loss_mask), gamma=1.0, lam=0.5)
    >>> advantages  # last: 1 - 0.25 = 0.75; first: (0 + 0.25 - 0.5) + 0.5 * 0.75 = 0.125
    tensor([0.1250, 0.0000, 0.7500])
    >>> returns
    tensor([0.6250, 0.0000, 1.0000])
    """
    return gae_packed(rewards, values, loss_mask, [len(loss_mask)], gamma, lam)


def gae_packed(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, lengths: Sequence[int], gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`gae` of many sequences at once, laid end to end: sequence i is the next `lengths[i]` of the T positions.

    It takes one short tensor operation per time step, whatever the number of sequences.

    Args:
        rewards, values: [T]. loss_mask: [T] bool. lengths: S numbers that sum to T; 0 is allowed.

    Returns:
        (advantages [T], returns [T]), as `gae`.

    Raises:
        ValueError: as `gae`, and lengths that do not sum to T.

    >>> rewards, values, loss_mask = torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3), torch.ones(3, dtype=torch.bool)
    >>> gae_packed(rewards, values, loss_mask, lengths=[2, 1], gamma=1.0, lam=0.5)[0]
    tensor([0.5000, 1.0000, 2.0000])
    """
    _check_mask(loss_mask, rewards=rewards, values=values)
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma and lam must lie in [0, 1], got gamma={gamma}, lam={lam}")
    if loss_mask.dim() != 1 or sum(lengths) != len(loss_mask) or any(length < 0 for length in lengths):
        raise ValueError(
            f"{len(lengths)} lengths with sum {sum(lengths)} do not cut a tensor of shape {tuple(loss_mask.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    if not loss_mask.any():
        return torch.zeros_like(values, dtype=dtype), torch.zeros_like(values, dtype=dtype)

    # Drop what is not trained on, and what remains is ordinary GAE.
    num_loss_tokens = torch.stack([mask.sum() for mask in loss_mask.split(list(lengths))])  # [S]
    rewards, values = rewards.detach()[loss_mask].to(dtype), values.detach()[loss_mask].to(dtype)
    next_values = values.roll(-1)
    next_values[num_loss_tokens.cumsum(0) - 1] = 0.0  # at each sequence's end (an empty one names another's)
    deltas = rewards + gamma * next_values - values

    # A row is a time step of all sequences, which the padding after their ends leaves as they are.
    counts = num_loss_tokens.tolist()
    rows = pad_sequence(deltas.split(counts), batch_first=True).t().contiguous()
    steps = rows.unbind(0)
    for step in range(len(steps) - 2, -1, -1):
        steps[step].add_(steps[step + 1], alpha=gamma * lam)
    sequences = rows.t().contiguous().unbind(0)
    advantages = torch.cat([sequence[:count] for sequence, count in zip(sequences, counts, strict=True)])

    zeros = advantages.new_zeros(loss_mask.shape)
    return zeros.masked_scatter(loss_mask, advantages), zeros.masked_scatter(loss_mask, advantages + values)


def discounted_returns(rewards: Tensor, loss_mask: Tensor, lengths: Sequence[int], gamma: float) -> Tensor:
    """The sum of the rewards from each loss token on, of many sequences laid end to end: `gae_packed` without a critic.

        R_t = r_t + gamma * R_{t+1}

    With the KL penalty in the rewards (`token_rewards`) and the whole batch whitened (`whiten`) this is REINFORCE++
    (arXiv 2501.03262): A_t = score - beta * sum_{i >= t} KL_i, normalised over the global batch.

    Args and Raises: as `gae_packed`.

    Returns:
        [T], 0 where the mask is False.

    >>> rewards, loss_mask = torch.tensor([-0.25, 9.0, 1.0, 2.0]), torch.tensor([True, False, True, True])
    >>> discounted_returns(rewards, loss_mask, lengths=[3, 1], gamma=0.5)
    tensor([0.2500, 0.0000, 1.0000, 2.0000])
    """
    return gae_packed(rewards, torch.zeros_like(rewards), loss_mask, lengths, gamma, lam=1.0)[0]


def grpo(
    scores: Sequence[float], groups: Sequence[Hashable], normalise_by_std: bool = True, eps: float = 1e-6
) -> list[float]:
    """The score of each answer against the other answers to its prompt.

        A_i = (score_i - mean(group)) / (std(group) + eps)

    with the unbiased standard deviation (divided by n - 1, as verl's torch.std). GRPO: DeepSeekMath (arXiv
    2402.03300), section 4.1.2. Without `normalise_by_std` the numerator alone: Dr. GRPO, Understanding R1-Zero-Like
    Training (arXiv 2503.20783).

    A group of one has no baseline: its mean is taken as 0 and its standard deviation as 1, as in verl, so that the
    advantage is the score (divided by 1 + eps). A group whose scores are all equal gets 0.

    Args:
        scores: S numbers. groups: S hashable ids; equal ids form a group, in any order.

    Raises:
        ValueError: numbers of scores and groups that differ; a score that is not finite.

    >>> [round(a, 4) for a in grpo([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"])]  # std is sqrt(0.5)
    [0.7071, -0.7071, 0.7071, -0.7071]
    """
    advantages = [0.0] * len(scores)
    for members in _members_of_groups(scores, groups):
        mean, std = 0.0, 1.0
        if len(members) > 1:
            mean = math.fsum(scores[i] for i in members) / len(members)
            std = math.sqrt(math.fsum((scores[i] - mean) ** 2 for i in members) / (len(members) - 1))
        for i in members:
            advantages[i] = (scores[i] - mean) / (std + eps if normalise_by_std else 1.0)
    return advantages


def dr_grpo(scores: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """`grpo` without the division by the standard deviation (arXiv 2503.20783).

    That division favours questions whose answers are nearly all right or nearly all wrong. Whitened over the whole
    batch (`whiten`) this is the baseline form of REINFORCE++ (arXiv 2501.03262).

    >>> dr_grpo([1.0, 0.0, 0.0, 0.0], ["a"] * 4)
    [0.75, -0.25, -0.25, -0.25]
    """
    return grpo(scores, groups, normalise_by_std=False)


def rloo(scores: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """The score of each answer minus the mean of the *other* answers to its prompt.

        A_i = score_i - sum_{j != i} score_j / (n - 1) = (score_i - mean(group)) * n / (n - 1)

    REINFORCE Leave-One-Out: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback
    in LLMs (arXiv 2402.14740). In a group of one the baseline is 0 and the advantage is the score, as in verl.

    Args and Raises: as `grpo`.

    >>> rloo([1.0, 0.0, 0.0, 7.0], ["a", "a", "a", "b"])
    [1.0, -0.5, -0.5, 7.0]
    """
    advantages = [0.0] * len(scores)
    for members in _members_of_groups(scores, groups):
        n = len(members)
        mean = math.fsum(scores[i] for i in members) / n
        for i in members:
            advantages[i] = (scores[i] - mean) * n / (n - 1) if n > 1 else scores[i]
    return advantages


def opo(scores: Sequence[float], groups: Sequence[Hashable], lengths: Sequence[int]) -> list[float]:
    """The score of each answer minus the mean of its group, weighted by the answers' lengths.

        A_i = score_i - sum_j length_j * score_j / sum_j length_j

    On-Policy RL with Optimal reward baseline (arXiv 2505.23585): the baseline of least variance, where the squared norm
    of an answer's gradient is taken to grow with its length. In a group of one the baseline is 0, as in verl.

    Args:
        lengths: S numbers, the loss tokens of each answer.

    Raises:
        ValueError: as `grpo`, and a number of lengths that differs.

    >>> opo([1.0, 0.0, 7.0], ["a", "a", "b"], lengths=[1, 3, 5])  # baseline 1 / 4
    [0.75, -0.25, 7.0]
    """
    if len(lengths) != len(scores):
        raise ValueError(f"{len(scores)} scores but {len(lengths)} lengths")
    advantages = [0.0] * len(scores)
    for members in _members_of_groups(scores, groups):
        total, baseline = sum(lengths[i] for i in members), 0.0
        if len(members) > 1 and total:
            baseline = math.fsum(lengths[i] * scores[i] for i in members) / total
        for i in members:
            advantages[i] = scores[i] - baseline
    return advantages


def remax(scores: Sequence[float], baselines: Sequence[float]) -> list[float]:
    """The score of each answer minus that of the greedy answer to its prompt.

        A_i = score_i - score of argmax decoding

    ReMax (arXiv 2310.10505): a baseline that depends on the prompt alone leaves the policy gradient unbiased, and costs
    one answer more a prompt.

    Args:
        baselines: S numbers, the score of the greedy answer to the same prompt.

    Raises:
        ValueError: numbers of scores and baselines that differ; one of them that is not finite.

    >>> remax([1.0, 0.0, 0.25], [0.5, 0.5, 1.0])
    [0.5, -0.5, -0.75]
    """
    if len(scores) != len(baselines):
        raise ValueError(f"{len(scores)} scores but {len(baselines)} baselines")
    for i, (score, baseline) in enumerate(zip(scores, baselines, strict=True)):
        if not (math.isfinite(score) and math.isfinite(baseline)):
            raise ValueError(
                f"the score of answer {i} is {score}, of the greedy answer {baseline}: a reward must be finite"
            )
    return [score - baseline for score, baseline in zip(scores, baselines, strict=True)]


def gpg(scores: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """`dr_grpo` times the batch's answers over those of them that teach something.

        A_i = alpha * (score_i - mean(group)),        alpha = B / (B - M)

    with B answers in the whole batch, M of them in groups whose scores are all equal: these have no gradient, but count
    in the mean. GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning (arXiv 2504.02546), with
    its F_norm = 1. verl takes the answers with a score of 0 for M instead. When no group teaches anything all are 0.

    Args and Raises: as `grpo`.

    >>> gpg([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"])  # alpha = 4 / 2
    [1.0, -1.0, 0.0, 0.0]
    """
    teaching = 0
    for members in _members_of_groups(scores, groups):
        own = {scores[i] for i in members} | ({0.0} if len(members) == 1 else set())  # one: compared with 0
        teaching += len(members) if len(own) > 1 else 0
    alpha = len(scores) / teaching if teaching else 0.0
    return [alpha * advantage for advantage in dr_grpo(scores, groups)]


def grpo_passk(
    scores: Sequence[float], groups: Sequence[Hashable], normalise_by_std: bool = True, eps: float = 1e-6
) -> list[float]:
    """What each answer adds to the best of its group, so that the policy learns pass@k with k answers to a prompt.

        A_i = (max_j score_j - max_{j != i} score_j) / (std(group) + eps)

    The best answer alone gets something: what it is better by than the second best; 0 in a tie. Optimizing Language
    Models for Inference Time Objectives using Reinforcement Learning (arXiv 2503.19595) has it without the division;
    verl divides, as in `grpo`. A group of one is treated as in `grpo`.

    Args and Raises: as `grpo`.

    >>> grpo_passk([1.0, 0.25, 0.0, 3.0], ["a", "a", "a", "b"], normalise_by_std=False)
    [0.75, 0.0, 0.0, 3.0]
    """
    advantages = [0.0] * len(scores)
    for members in _members_of_groups(scores, groups):
        best, second, std = scores[members[0]], 0.0, 1.0
        if len(members) > 1:
            second, best = sorted(scores[i] for i in members)[-2:]
            std = statistics.stdev(scores[i] for i in members)
        winner = max(members, key=lambda i: scores[i])
        advantages[winner] = (best - second) / (std + eps if normalise_by_std else 1.0)
    return advantages


GroupAdvantage = Callable[[Sequence[float], Sequence[Hashable], Sequence[int], bool], list[float]]

GROUP_ADVANTAGES: dict[str, GroupAdvantage] = {
    "grpo": lambda scores, groups, lengths, normalise_by_std: grpo(scores, groups, normalise_by_std),
    "rloo": lambda scores, groups, lengths, normalise_by_std: rloo(scores, groups),
    "opo": lambda scores, groups, lengths, normalise_by_std: opo(scores, groups, lengths),
    "gpg": lambda scores, groups, lengths, normalise_by_std: gpg(scores, groups),
    "grpo_passk": lambda scores, groups, lengths, normalise_by_std: grpo_passk(scores, groups, normalise_by_std),
    "reinforce_pp_baseline": lambda scores, groups, lengths, normalise_by_std: dr_grpo(scores, groups),
}
"""By the name in algorithm.advantage: scores, groups and numbers of loss tokens, [S] each, and the key
algorithm.normalise_by_std; of these each takes what it looks at."""


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares: what ranks add to know the mean and standard deviation of all their values.

    Sums are taken in float64. To add over ranks, reduce `dataclasses.astuple(moments)` as a float64 tensor and unpack
    it again.

    >>> Moments(2, 3.0, 5.0) + Moments(1, 3.0, 9.0)
    Moments(count=3, total=6.0, total_of_squares=14.0)
    """

    count: float
    total: float
    total_of_squares: float

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """The moments of `values` where `mask` (bool, same shape) is True.

        Raises:
            ValueError: shapes that differ; a mask that is not bool.

        >>> Moments.of(torch.tensor([1.0, 2.0, 99.0]), torch.tensor([True, True, False]))
        Moments(count=2, total=3.0, total_of_squares=5.0)
        """
        _check_mask(mask, values=values)
        chosen = values.detach()[mask].double()
        return cls(chosen.numel(), float(chosen.sum()), float(chosen.square().sum()))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )

    @property
    def mean(self) -> float:
        """total / count; 0 when there are no values."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Unbiased (divided by count - 1), as in verl's masked_whiten; 0 below two values, where verl raises."""
        if self.count < 2:
            return 0.0
        squares = (self.total_of_squares - self.total * self.mean) / (self.count - 1)
        return 0.0 if squares < 0.0 else squares  # rounding may leave -1e-17; NaN stays NaN

    @property
    def std(self) -> float:
        return math.sqrt(self.variance)


def whiten(values: Tensor, mask: Tensor, moments: Moments, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """Values shifted to mean 0 and scaled to variance 1, by moments that may come from more values than are here.

        (x - mean) / sqrt(variance + eps)        and + mean again if not shift_mean

    The moments of all ranks whiten each rank's values as if they lay together; verl's masked_whiten has this formula
    and eps.

    Args:
        values: any shape, usually [T]. mask: bool, the same shape.

    Returns:
        The shape and dtype of values, 0 where the mask is False.

    Raises:
        ValueError: shapes that differ; a mask that is not bool.

    >>> values, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])
    >>> whiten(values, mask, Moments.of(values, mask))  # mean 2, variance 2
    tensor([-0.7071,  0.7071,  0.0000])
    """
    _check_mask(mask, values=values)
    whitened = (values.detach() - moments.mean) * (moments.variance + eps) ** -0.5
    return torch.where(mask, whitened if shift_mean else whitened + moments.mean, 0.0)


def _check_mask(mask: Tensor, **tensors: Tensor | None) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask must be bool, got {mask.dtype}: compare with 0 first")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != mask.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} and its mask {tuple(mask.shape)} differ in shape")


def _members_of_groups(scores: Sequence[float], groups: Sequence[Hashable]) -> list[list[int]]:
    if len(scores) != len(groups):
        raise ValueError(f"{len(scores)} scores but {len(groups)} group ids")
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, (score, group) in enumerate(zip(scores, groups, strict=True)):
        if not math.isfinite(score):
            raise ValueError(f"the score of answer {i} in group {group!r} is {score}: a reward must be finite")
        members[group].append(i)
    return list(members.values())
