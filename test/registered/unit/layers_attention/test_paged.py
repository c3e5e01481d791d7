import numpy as np
import pytest
import torch

from kits.attention_world import NUM_LAYERS, MlaCall, MlaData, World, assign_pages, dense_gqa
from sglane.layers.attention import blocked, cost
from sglane.layers.attention.blocked import merge_partials

LENGTHS = [41, 150, 7, 64, 300]
SCALE = 0.3


def schedule(lengths: list[int], chunk: int, num_continues: int) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """Chunks of all slots in turn, then continues; later slots still extend while earlier ones continue."""
    steps, done = [], dict.fromkeys(range(len(lengths)), 0)
    while any(done[slot] < length for slot, length in enumerate(lengths)):
        extends, continues = [], []
        for slot, length in enumerate(lengths):
            prompt = max(1, length - num_continues)
            if done[slot] < prompt:
                n = min(chunk, prompt - done[slot])
                extends.append((slot, n))
                done[slot] += n
            elif done[slot] < length:
                continues.append(slot)
                done[slot] += 1
        steps.append((extends, continues))
    return steps


def check(world: World, call, expected: list[list[torch.Tensor]], chunk: int, tap=None) -> None:
    for extends, continues in schedule(LENGTHS, chunk, 5):
        out, tokens = world.step(extends, continues, call, tap)
        for layer in range(NUM_LAYERS):
            want = torch.stack([expected[layer][slot][position] for slot, position in tokens])
            torch.testing.assert_close(out[layer], want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("chunk", [8, 64, 1000])
def test_gqa_equals_dense(cp_size: int, page_size: int, chunk: int) -> None:
    gen, rng = torch.Generator().manual_seed(1), np.random.default_rng(2)
    q = [torch.randn(n, 6, 8, generator=gen) for n in LENGTHS]
    k, v = ([torch.randn(n, 2, 8, generator=gen) for n in LENGTHS] for _ in range(2))
    world = World(page_size, cp_size, assign_pages(rng, LENGTHS, page_size, cp_size), 2 * 2 * 8)

    def call(attention, layer, slots, positions):
        found = [torch.stack([x[s][p] for s, p in zip(slots, positions)]) if len(slots) else x[0][:0] for x in (q, k, v)]
        return attention.gqa(layer, found[0], found[1] + layer, found[2] - layer, SCALE)

    expected = [[dense_gqa(*x, SCALE) for x in zip(q, [a + layer for a in k], [b - layer for b in v])] for layer in range(NUM_LAYERS)]
    check(world, call, expected, chunk)


def mla_case(ties: bool, nope: int = 8) -> tuple[list[MlaData], torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(3)
    data = [MlaData.random(gen, n, nope=nope, ties=ties) for n in LENGTHS]
    return data, torch.randn(4, nope, 16, generator=gen) / 4, torch.randn(4, 6, 16, generator=gen) / 4


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("chunk", [8, 64, 1000])
def test_dense_mla_equals_expanded_reference(cp_size: int, page_size: int, chunk: int) -> None:
    data, w_uk, w_uv = mla_case(False)
    world = World(page_size, cp_size, assign_pages(np.random.default_rng(4), LENGTHS, page_size, cp_size), 20)
    expected = [[d.dense(w_uk, w_uv, SCALE, None) for d in data]] * NUM_LAYERS
    check(world, MlaCall(data, w_uk, w_uv, SCALE, None), expected, chunk)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_both_forms_of_mla_extends_agree(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglane.layers.attention.mla.mla_expanded", lambda *args: form == "expanded")
    data, w_uk, w_uv = mla_case(False)
    world = World(16, 1, assign_pages(np.random.default_rng(4), LENGTHS, 16, 1), 20)
    check(world, MlaCall(data, w_uk, w_uv, SCALE, None), [[d.dense(w_uk, w_uv, SCALE, None) for d in data]] * NUM_LAYERS, 64)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 8), (4, 1000), (16, 64), (64, 8), (64, 1000)])
def test_sparse_mla_selects_and_attends_exactly(ties: bool, cp_size: int, page_size: int, chunk: int) -> None:
    topk = 24
    data, w_uk, w_uv = mla_case(ties)
    sets = [d.selected(0.25, topk) for d in data]
    world = World(page_size, cp_size, assign_pages(np.random.default_rng(5), LENGTHS, page_size, cp_size), 20, 8)
    seen: dict[tuple[int, int, int], set[int]] = {}

    def tap(layer, slot, positions, chosen):
        for i, position in enumerate(positions.tolist()):
            found = range(position + 1) if chosen is None else [p for p in chosen[i].tolist() if p >= 0]
            seen.setdefault((layer, slot, position), set()).update(found)

    expected = [[d.dense(w_uk, w_uv, SCALE, s) for d, s in zip(data, sets)]] * NUM_LAYERS
    check(world, MlaCall(data, w_uk, w_uv, SCALE, topk, share=True), expected, chunk, tap)
    assert {key: sorted(found) for key, found in seen.items()} == {
        (0, slot, p): sets[slot][p].tolist() for slot, n in enumerate(LENGTHS) for p in range(n)}


def test_small_tiles_and_head_groups_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cost", "mla", "indexer"):
        monkeypatch.setattr(f"sglane.layers.attention.{module}.TILE_ELEMENTS", 700)
    monkeypatch.setattr(cost, "GATHER_TOKENS", 128)
    monkeypatch.setattr("sglane.layers.attention.mla.SPARSE_TILE_TOKENS", 50)
    monkeypatch.setattr("sglane.layers.attention.paged.SPARSE_TOKENS", 50)
    data, w_uk, w_uv = mla_case(False)
    for topk in (None, 24):
        sets = [None if topk is None else d.selected(0.25, topk) for d in data]
        world = World(16, 1, assign_pages(np.random.default_rng(6), LENGTHS, 16, 1), 20, 8)
        check(world, MlaCall(data, w_uk, w_uv, SCALE, topk), [[d.dense(w_uk, w_uv, SCALE, s) for d, s in zip(data, sets)]] * NUM_LAYERS, 64)


def test_merge_of_partials_equals_softmax_over_all_keys() -> None:
    gen = torch.Generator().manual_seed(7)
    scores, values = torch.randn(5, 40, generator=gen) * 20, torch.randn(40, 3, generator=gen)
    parts = [slice(0, 11), slice(11, 11), slice(11, 40)]
    o = torch.stack([scores[:, p].softmax(-1) @ values[p] for p in parts])
    lse = torch.stack([scores[:, p].logsumexp(-1) for p in parts])
    assert (lse[1] == float("-inf")).all()
    torch.testing.assert_close(merge_partials(o, lse), scores.softmax(-1) @ values, atol=1e-5, rtol=1e-5)
    assert (merge_partials(o[1:2], lse[1:2]) == 0).all()  # empty everywhere: zeros, not NaN


def test_partial_attention_of_any_visible_counts() -> None:
    """Queries may see the same number of keys, or none."""
    gen = torch.Generator().manual_seed(10)
    q, k, v = torch.randn(6, 4, 8, generator=gen), torch.randn(2, 9, 8, generator=gen), torch.randn(2, 9, 5, generator=gen)
    for last in ([0, 0, 2, 2, 2, 5], [-1, -1, 0, 0, 3, 3], [8] * 6, [-1] * 6, list(range(3, 9))):
        o, lse = blocked.attend_partial(q, k, v, np.array(last), 0.5)
        for i, end in enumerate(last):
            scores = torch.einsum("hd,htd->ht", q[i], k.repeat_interleave(2, 0)[:, :end + 1]) * 0.5
            want = torch.einsum("ht,htd->hd", scores.softmax(-1), v.repeat_interleave(2, 0)[:, :end + 1])
            torch.testing.assert_close(o[i], want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse[i], scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_bfloat16_rows_agree_with_float32() -> None:
    gen = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(3, *s, generator=gen) for s in ((1, 2, 3, 16), (40, 2, 16), (40, 2, 16)))
    hidden = (torch.arange(40)[None] >= torch.tensor([[40], [17], [1]])).unsqueeze(1)
    want, _ = blocked.attend_rows(q, k, v, hidden, 0.25, False)
    got, _ = blocked.attend_rows(q.bfloat16(), k.bfloat16(), v.bfloat16(), hidden, 0.25, False)
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)


def test_decode_buckets_bound_the_padding() -> None:
    pages = np.random.default_rng(9).integers(1, 2000, 64)
    groups = cost.decode_buckets(pages, 4)
    assert sorted(np.concatenate(groups).tolist()) == list(range(64))
    for group in groups:
        assert len(group) * pages[group].max() <= 2 * pages[group].sum()
        assert len(group) == 1 or len(group) * pages[group].max() * 4 <= cost.GATHER_TOKENS


def test_expanded_form_is_for_many_queries() -> None:
    dims = (128, 64, 128, 512)
    assert cost.mla_expanded(2048, 2048, dims)
    assert not cost.mla_expanded(1, 4096, dims)
