"""Property tests here have no deadline: on a busy machine a first example takes longer than hypothesis allows."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
