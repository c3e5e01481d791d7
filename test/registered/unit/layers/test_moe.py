"""Router and experts against slow versions that work token by token."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from sglane.configs.sizes import MoeConfig
from sglane.layers.linear import Linear
from sglane.layers.mlp import GatedMLP
from sglane.layers.moe.experts import Experts, MoE
from sglane.layers.moe.router import Router
from sglane.layers.weights import Matrix

HIDDEN, SIZE = 12, 6
CONFIG = MoeConfig(num_experts=8, num_shared_experts=1, topk=2, intermediate_size=SIZE, num_groups=4, topk_groups=2, norm_topk_prob=True,
                   scaling_factor=2.5, layers=frozenset({0}))


def slow_route(x, weight, bias, config):
    """ids and weights of one token x [hidden], by the definition."""
    scores = [float(torch.sigmoid((x * row).sum())) for row in weight]
    biased = [score + float(b) for score, b in zip(scores, bias)]
    per_group = config.num_experts // config.num_groups
    groups = [sorted(biased[g * per_group:(g + 1) * per_group])[-2:] for g in range(config.num_groups)]
    kept = sorted(range(config.num_groups), key=lambda g: -sum(groups[g]))[:config.topk_groups]
    allowed = [e for e in range(config.num_experts) if e // per_group in kept]
    ids = sorted(allowed, key=lambda e: -biased[e])[:config.topk]
    total = sum(scores[e] for e in ids) if config.norm_topk_prob else 1.0
    return ids, [scores[e] / total * config.scaling_factor for e in ids]


@pytest.mark.parametrize("changes", [{}, {"num_groups": 1, "topk_groups": 1}, {"norm_topk_prob": False}, {"topk": 3}])
def test_router(changes):
    config = dataclasses.replace(CONFIG, **changes)
    weight, bias, x = torch.randn(8, HIDDEN), torch.randn(8), torch.randn(50, HIDDEN)
    ids, weights = Router(weight, bias, config)(x)
    for row in range(50):
        expected_ids, expected = slow_route(x[row], weight, bias, config)
        assert ids[row].tolist() == expected_ids
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-5)


def test_negative_scores_never_let_another_group_in():
    """With a bias that makes every score negative, experts outside the kept groups would win if they counted as 0."""
    bias = torch.full((8,), -5.0)
    bias[0:4] = -3.0
    ids, _ = Router(torch.zeros(8, HIDDEN), bias, CONFIG)(torch.randn(3, HIDDEN))
    assert ids.max() < 4


def mlp(seed):
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = torch.randn(2 * SIZE, HIDDEN, generator=generator), torch.randn(HIDDEN, SIZE, generator=generator)
    return GatedMLP(Linear(Matrix(gate_up)), Linear(Matrix(down))), gate_up, down


def test_gated_mlp():
    layer, gate_up, down = mlp(0)
    x = torch.randn(4, HIDDEN)
    assert torch.allclose(layer(x), (F.silu(x @ gate_up[:SIZE].T) * (x @ gate_up[SIZE:].T)) @ down.T, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
def test_experts(num_tokens):
    layers = [mlp(seed)[0] for seed in range(8)]
    x, ids = torch.randn(num_tokens, HIDDEN), torch.stack([torch.randperm(8)[:2] for _ in range(num_tokens)] or [torch.zeros(2).long()])[:num_tokens]
    weights = torch.rand(num_tokens, 2)
    found = Experts(layers)(x, ids, weights)
    assert found.shape == (num_tokens, HIDDEN)
    for row in range(num_tokens):
        expected = sum(weights[row, i] * layers[ids[row, i]](x[row:row + 1])[0] for i in range(2))
        assert torch.allclose(found[row], expected, atol=1e-4)


def test_experts_nobody_chose_do_not_run():
    class Never:
        def __call__(self, x):
            raise AssertionError("an expert without rows was run")

    layers = [mlp(0)[0], Never(), mlp(1)[0]]
    Experts(layers)(torch.randn(3, HIDDEN), torch.tensor([[0, 2]] * 3), torch.ones(3, 2))


def test_shared_experts_are_not_scaled():
    """The scaling factor is on the routed part only."""
    layers, shared = [mlp(seed)[0] for seed in range(8)], mlp(99)[0]
    router = Router(torch.randn(8, HIDDEN), torch.randn(8), CONFIG)
    x = torch.randn(5, HIDDEN)
    with_shared, without = MoE(router, Experts(layers), shared)(x), MoE(router, Experts(layers), None)(x)
    assert torch.allclose(with_shared - without, shared(x), atol=1e-4)
