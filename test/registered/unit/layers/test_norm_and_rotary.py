"""Norms and rope: formulas, layouts, frequencies of the three schemes, exactness at far positions."""
import math

import pytest
import torch

from kits import oracle
from sglane.configs.sizes import RopeConfig
from sglane.layers.norm import MANY_ROWS, LayerNorm, RMSNorm
from sglane.layers.rotary import TILE_ROWS, Rotary, frequencies, rotate_halves, rotate_pairs

CPU = torch.device("cpu")


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(eps):
    x, weight = torch.randn(3, 5, 16) * 0.1, torch.randn(16)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    assert torch.allclose(RMSNorm(weight, eps)(x), expected, atol=1e-6)


def test_norms_compute_in_float32():
    x, weight = torch.randn(4, 64).bfloat16() * 100, torch.randn(64).bfloat16()
    expected = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    found = RMSNorm(weight, 1e-6)(x)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_many_bfloat16_rows_are_rounded_twice_at_most(scale):
    """Once normed, once weighted, as transformers does."""
    x, weight = torch.randn(MANY_ROWS + 1, 64).bfloat16() * scale, torch.randn(64).bfloat16()
    normed = torch.nn.functional.rms_norm(x.double(), (64,), None, 1e-6).bfloat16()
    found = RMSNorm(weight, 1e-6)(x)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), (normed * weight).double(), rtol=2 ** -6, atol=0)
    assert (found == normed * weight).float().mean() > 0.99  # else a rounding the other way


def test_layer_norm_eps_is_the_indexers():
    x = torch.randn(4, 8) * 1e-3  # small enough that eps matters
    weight, bias = torch.randn(8), torch.randn(8)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    assert torch.allclose(LayerNorm(weight, bias)(x), expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 8), (0, 3, 8)])
def test_layouts(shape):
    """Pairs are (2j, 2j + 1) in one layout and (j, j + d/2) in the other; the rotation is the same."""
    x = torch.randn(shape)
    angles = Rotary(RopeConfig(10000.0), 8, CPU).angles(torch.tensor([0, 1, 77, 4000])[:shape[0]])
    regrouped = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    paired, halves = rotate_pairs(x, angles), rotate_halves(regrouped, angles)
    torch.testing.assert_close(torch.cat((paired[..., 0::2], paired[..., 1::2]), -1), halves, rtol=1e-6, atol=1e-6)
    if shape[0]:
        assert torch.equal(paired[0], x[0])  # position 0 does not turn
        a, b = x[1, ..., 0], x[1, ..., 1]
        assert torch.allclose(paired[1, ..., 0], a * math.cos(1.0) - b * math.sin(1.0), atol=1e-6)
        assert torch.allclose(paired[1, ..., 1], b * math.cos(1.0) + a * math.sin(1.0), atol=1e-6)


def test_dot_products_depend_on_distance_only():
    q, k = torch.randn(1, 64), torch.randn(1, 64)
    rotary = Rotary(RopeConfig(1e6), 64, CPU)

    def dot(i, j):
        return float((rotate_pairs(q, rotary.angles(torch.tensor([i]))) * rotate_pairs(k, rotary.angles(torch.tensor([j])))).sum())

    assert dot(100, 40) == pytest.approx(dot(160, 100), abs=1e-3)


def test_far_positions_need_no_table():
    angles = Rotary(RopeConfig(8e6), 64, CPU).angles(torch.tensor([1_048_575]))
    assert float(angles.cos[0, 0]) == pytest.approx(math.cos(1_048_575.0), abs=1e-5)


def test_yarn_of_deepseek():
    """Dimensions up to 10 keep their frequency, from 23 on it is divided by 40."""
    config = RopeConfig(10000.0, "yarn", 40, 4096, mscale_all_dim=1.0)
    ratio = frequencies(RopeConfig(10000.0), 64) / frequencies(config, 64)
    assert torch.allclose(ratio[:11], torch.ones(11)) and torch.allclose(ratio[23:], torch.full((9,), 40.0))
    assert ((ratio[11:23] > 1) & (ratio[11:23] < 40)).all() and (ratio.diff() >= -1e-4).all()


def test_schemes_against_the_oracle():
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    assert torch.allclose(frequencies(RopeConfig(5e5, "yarn", 4, 512, 16, 2), 32),
                          oracle.frequencies({"rope_theta": 5e5, "rope_scaling": yarn}, 32))
    assert torch.allclose(frequencies(RopeConfig(5e5, "llama3", 8.0, 64), 16),
                          oracle.frequencies({"rope_parameters": {"rope_theta": 5e5, **llama3}}, 16))


def test_factors_divide_and_amplitude_multiplies():
    plain = frequencies(RopeConfig(100.0), 4)
    assert torch.equal(frequencies(RopeConfig(100.0, "factors", factors=(1.0, 8.0)), 4), plain / torch.tensor([1.0, 8.0]))
    one, two = (Rotary(RopeConfig(100.0, amplitude=a), 4, CPU).angles(torch.tensor([3])) for a in (1.0, 2.0))
    assert torch.equal(two.cos, 2 * one.cos) and torch.equal(two.sin, 2 * one.sin)


def test_tiles_of_tokens_are_rotated_alike():
    x = torch.randn(2 * TILE_ROWS + 3, 2, 8)
    angles = Rotary(RopeConfig(theta=100.0), 8, CPU).angles(torch.arange(len(x)))
    whole = rotate_halves(x, angles)
    for begin in (0, TILE_ROWS - 1, TILE_ROWS, len(x) - 1):
        one = rotate_halves(x[begin:begin + 1], type(angles)(*(part[begin:begin + 1] for part in angles)))
        assert torch.equal(whole[begin:begin + 1], one)
