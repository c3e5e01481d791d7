"""Router and experts against slow versions that work token by token; experts of several ranks against those of one."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from kits.thread_ranks import ThreadGroup
from sglane.configs.sizes import MoeConfig
from sglane.forward.expert_rows import NO_EXPERT, LocalRows, expert_rows, pack, unpack
from sglane.layers.linear import Linear
from sglane.layers.mlp import GatedMLP
from sglane.layers.moe.experts import Experts, MoE
from sglane.layers.moe.router import Router
from sglane.layers.moe.shard import ExpertShard
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
    with_shared, without = (MoE(router, Experts(layers), part)(x, LocalRows()) for part in (shared, None))
    assert torch.allclose(with_shared - without, shared(x), atol=1e-4)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("num_experts", [1, 6, 7, 8, 256])
def test_shards_are_neighbouring_even_and_cover_all(num_experts, size):
    held = [ExpertShard(rank, size).held(num_experts) for rank in range(size)]
    assert [e for part in held for e in part] == list(range(num_experts))
    lengths = [len(part) for part in held]
    assert max(lengths) - min(lengths) <= 1


class Counted:
    """Remembers which rows an expert computed."""

    def __init__(self, layer):
        self._layer = layer
        self.num_rows = 0

    def __call__(self, x):
        assert x.isfinite().all() and x.abs().sum(-1).all(), "padding was computed"
        self.num_rows += len(x)
        return self._layer(x)


def sharded(x_of, max_rows, layers, router, shared, group):
    """Outputs, ids and the rows that experts computed, of all ranks; x_of: the local rows of each."""
    def work(rank):
        shard = ExpertShard(rank, len(x_of))
        held = shard.held(len(layers))
        experts = [Counted(layers[e]) for e in held]
        rows = expert_rows(group.groups(rank).experts, max_rows)
        found = MoE(router, Experts(experts, shard, held.start), shared)(x_of[rank], rows)
        return found, router(x_of[rank])[0], sum(expert.num_rows for expert in experts)

    return [list(part) for part in zip(*group.run(work))]


@pytest.mark.parametrize("lengths", ["even", "one rank has all", "some have none", "one row"])
@pytest.mark.parametrize("num_experts", [2, 6, 8])
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_ranks_equal_one_rank(cp_size, num_experts, lengths):
    """The same choices and, to 1e-5, the same sums; also for ranks without rows or without experts."""
    config = dataclasses.replace(CONFIG, num_experts=num_experts, num_groups=1, topk_groups=1)
    counts = {"even": [5] * cp_size, "one rank has all": [0] * (cp_size - 1) + [17], "some have none": [4 * (r % 2) for r in range(cp_size)],
              "one row": [1] + [0] * (cp_size - 1)}[lengths]
    layers, shared = [mlp(seed)[0] for seed in range(num_experts)], mlp(99)[0]
    router, x = Router(torch.randn(num_experts, HIDDEN), torch.randn(num_experts), config), torch.randn(sum(counts), HIDDEN)
    expected, group = MoE(router, Experts(layers), shared)(x, LocalRows()), ThreadGroup(cp_size)
    found, ids, num_computed = sharded(x.split(counts), max(counts), layers, router, shared, group)
    assert [len(part) for part in found] == counts
    assert torch.equal(torch.cat(ids), router(x)[0])
    assert (torch.cat(found) - expected).abs().max() < 1e-5 * expected.abs().max().clamp_min(1)
    assert sum(num_computed) == len(x) * config.topk
    assert group.groups(0).experts.num_calls == 2, "one gather and one reduction"


def test_no_exchange_if_no_rank_has_rows():
    group = ThreadGroup(3)
    found, _, _ = sharded([torch.zeros(0, HIDDEN)] * 3, 0, [mlp(0)[0]] * 8, Router(torch.randn(8, HIDDEN), torch.randn(8), CONFIG), None, group)
    assert [part.shape for part in found] == [(0, HIDDEN)] * 3 and group.groups(0).experts.num_calls == 0


@pytest.mark.parametrize(("shard", "size"), [(ExpertShard(0, 1), 2), (ExpertShard(1, 2), 2), (ExpertShard(0, 2), 3), (ExpertShard(0, 2), 1)])
def test_experts_of_another_rank_are_refused(shard, size):
    """Sums over such experts would count some twice and others not at all."""
    held = shard.held(8)
    moe = MoE(Router(torch.randn(8, HIDDEN), torch.randn(8), CONFIG), Experts([mlp(e)[0] for e in held], shard, held.start), None)
    rows = LocalRows() if size == 1 else expert_rows(ThreadGroup(size).exchange(0), 3)
    with pytest.raises(AssertionError, match=rf"holds (the experts|those) of rank {shard.rank} of {shard.size}"):
        moe(torch.randn(3, HIDDEN), rows)


def test_sums_are_rounded_once():
    """In bfloat16, the parts of all ranks are added in float32: as near to the exact sum as one rank is."""
    layers = [GatedMLP(*(Linear(Matrix(w.bfloat16())) for w in mlp(seed)[1:])) for seed in range(8)]
    router, x = Router(torch.randn(8, HIDDEN), torch.randn(8), dataclasses.replace(CONFIG, topk=4)), torch.randn(64, HIDDEN).bfloat16()
    one = MoE(router, Experts(layers), None)(x, LocalRows())
    found, _, _ = sharded(x.split(16), 16, layers, router, None, ThreadGroup(4))
    assert torch.cat(found).dtype == torch.bfloat16
    assert (torch.cat(found) == one).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "topk"), [(12, 2), (13, 3), (1, 1), (7, 8)])
def test_packed_rows(hidden, topk, dtype):
    """Whatever the sizes, what was packed comes out; padding chose nobody."""
    x, ids, weights = torch.randn(5, hidden).to(dtype), torch.randint(0, 256, (5, topk)), torch.rand(5, topk)
    found = unpack(pack(x, ids, weights, 7), hidden, topk, dtype)
    for part, expected in zip(found, (x, ids, weights)):
        assert torch.equal(part[:5], expected) and part.dtype == expected.dtype
    assert (found[1][5:] == NO_EXPERT).all() and not found[0][5:].any()
