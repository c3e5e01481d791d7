"""Which tokens a verified window yields.

Every position of a window is sampled from the target exactly as it is without speculation, with the same stateless noise; a draft is accepted if
and only if it is that token. This is rejection sampling against a draft distribution with all its mass in one token (Leviathan et al. 2023, section
2.3, with q = 1 at the draft): it is accepted with the target's probability p(draft), and the token that is taken instead has the distribution p
without the draft. So the distribution of the output is the target's, and what is seeded or greedy is, token for token, what it would be without
speculation.
"""
from collections.abc import Callable, Sequence

import numpy as np

#: (windows, the tokens that each of them has yielded so far) -> int64: the token that follows, one for each of these windows. A window is its index;
#: its row j, counted from 0, decides the token after j others.
Pick = Callable[[list[int], list[list[int]]], np.ndarray]


def accepted_runs(drafts: Sequence[np.ndarray], pick: Pick) -> list[np.ndarray]:
    """drafts: int64 [m] of each window, m may be 0. Returns each window's tokens, int64 [1 .. m + 1]: its accepted drafts, and one more."""
    runs: list[list[int]] = [[] for _ in drafts]
    going = list(range(len(drafts)))
    while going:
        for i, token in zip(going, pick(going, [runs[i] for i in going]).tolist()):
            runs[i].append(token)
        going = [i for i in going if len(runs[i]) <= len(drafts[i]) and drafts[i][len(runs[i]) - 1] == runs[i][-1]]
    return [np.array(run, np.int64) for run in runs]
