"""Environments: what answers to the model between its turns, such as a tool.

Ready made is `calculator`; your own is named as package.module:name. See protocol.py for what it must have, pool.py for
where it runs, observation.py for how its words become tokens."""

from megarl.environments.loading import BUILTIN, load_environment, prompt_messages
from megarl.environments.observation import ObservationTokens
from megarl.environments.pool import Environments
from megarl.environments.protocol import Environment, Prompted, SingleTurn, Step

__all__ = [
    "BUILTIN",
    "Environment",
    "Environments",
    "ObservationTokens",
    "Prompted",
    "SingleTurn",
    "Step",
    "load_environment",
    "prompt_messages",
]
