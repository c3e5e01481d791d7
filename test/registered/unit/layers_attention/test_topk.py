import numpy as np
import pytest
import torch

from sglane.layers.attention.topk import merge_topk, select_topk


def naive(scores: np.ndarray, topk: int) -> list[int]:
    return sorted(np.lexsort((np.arange(len(scores)), -scores))[:topk].tolist())


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
@pytest.mark.parametrize(("num_keys", "topk"), [(1, 4), (5, 5), (50, 16), (300, 16), (300, 299)])
def test_select_equals_naive_with_heavy_ties(levels: int, num_keys: int, topk: int) -> None:
    rng = np.random.default_rng(levels * 1000 + num_keys)
    for _ in range(20):
        scores = rng.integers(0, levels, (6, num_keys)).astype(np.float32)
        scores[0] = 0.0
        got = select_topk(torch.from_numpy(scores), topk)
        assert got.tolist() == [naive(row, topk) for row in scores]


def test_masked_keys_are_chosen_last() -> None:
    scores = torch.tensor([[1.0, -5.0, float("-inf"), float("-inf")], [float("-inf"), 0.0, 2.0, 3.0]])
    assert select_topk(scores, 3).tolist() == [[0, 1, 2], [1, 2, 3]]


def test_lane_merge_equals_the_global_cut() -> None:
    rng = np.random.default_rng(5)
    for trial in range(200):
        num_lanes, num_keys, topk = int(rng.integers(1, 5)), int(rng.integers(1, 80)), int(rng.integers(1, 30))
        scores = rng.integers(0, 4, num_keys).astype(np.float32)
        lanes = rng.integers(0, num_lanes, num_keys)
        k = min(topk, num_keys)
        cand = torch.full((num_lanes, 1, k), float("-inf"))
        positions = torch.zeros((num_lanes, 1, k), dtype=torch.int64)
        for lane in range(num_lanes):
            own = np.flatnonzero(lanes == lane)
            if len(own):
                best = own[select_topk(torch.from_numpy(scores[own])[None], k)[0].numpy()]
                cand[lane, 0, :len(best)] = torch.from_numpy(scores[best])
                positions[lane, 0, :len(best)] = torch.from_numpy(best)
        kept = merge_topk(cand, positions, topk)
        assert sorted(positions[kept].tolist()) == naive(scores, topk), trial
