"""Verifiable rewards: functions from an answer's text to a score.

Ready made are `gsm8k`, `gsm8k_flexible`, `exact` and `prefix`; your own is named as package.module:function. See
loading.py."""

from megarl.rewards.loading import BUILTIN, RewardFunction, load_reward, score_safely

__all__ = ["BUILTIN", "RewardFunction", "load_reward", "score_safely"]
