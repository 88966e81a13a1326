"""Verifiable rewards: functions from an answer's text to a score.

Ready made are `gsm8k`, `gsm8k_flexible`, `math`, `choice`, `code`, `exact` and `prefix`; your own is named as
package.module:function. See loading.py for how it is called, pool.py for where."""

from megarl.rewards.loading import BUILTIN, RewardFunction, load_reward, score_safely
from megarl.rewards.pool import RewardPool, Scored, is_timeout

__all__ = ["BUILTIN", "RewardFunction", "RewardPool", "Scored", "is_timeout", "load_reward", "score_safely"]
