"""Questions about a forest given as an array of parents, answered without walking it in Python.

Pointer doubling: after k rounds `above[i]` is the 2**k-th ancestor of i, so a chain of 8,192 blocks
takes 13 rounds. `root` is one more place at the end, its own parent, where every path ends.
"""

from __future__ import annotations

import numpy as np


def with_descendants(above: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Places (bool) that are in `found` (bool) or below one that is.

    `above` holds the parent of each place, or `len(above)` for none. The forest has no cycles.
    """
    root = len(above)
    above, goes = np.append(above, root), np.append(found, False)
    while (above != root).any():
        goes |= goes[above]
        above = above[above]
    result: np.ndarray = goes[:root]
    return result


def rooted(above: np.ndarray, good: np.ndarray) -> np.ndarray:
    """Places (bool) that are `good` (bool), have only good ancestors, and lie on no cycle."""
    root = len(above)
    above, lost = np.append(above, root), np.append(~good, False)
    for _ in range(root.bit_length()):
        lost |= lost[above]
        above = above[above]
    # A path that has not ended after as many steps as there are places never ends.
    result: np.ndarray = ~lost[:root] & (above[:root] == root)
    return result
