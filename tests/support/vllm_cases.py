"""What the tests of the connector with vLLM's scheduler are about, in numbers. Imports nothing."""

import random

BLOCK = 16
SYNC = {}
ASYNC = {"async_load_nbytes": 4096, "step_nbytes": 8192}
"""One block a step."""


def tokens(count, seed=0):
    """A random prompt; of equal seeds one is the start of the other."""
    return random.Random(f"prompt {seed}").choices(range(1, 61), k=count)
