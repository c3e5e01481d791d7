"""Rotary position embedding: frequencies of a model, angles of a step, and the two layouts of rotated pairs."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from sglane.configs.sizes import RopeConfig

#: Tokens that are rotated at once, so that their float32 copies stay in a cache.
TILE_ROWS = 512


class Angles(NamedTuple):
    """Cosine and sine of every token's angles, float32; shared by all layers of a step."""

    cos: Tensor  # [n, dim / 2]
    sin: Tensor  # [n, dim / 2]
    whole_cos: Tensor  # [n, dim]: cos for both halves


class Rotary:
    """Angles for any position: they are computed for the tokens of a step, so no table limits or outlives the context length."""

    def __init__(self, config: RopeConfig, dim: int, device: torch.device):
        """dim: values that are rotated per head."""
        self._frequencies = frequencies(config, dim).to(device)  # float32 [dim / 2]
        self._amplitude = config.amplitude

    def angles(self, positions: Tensor) -> Angles:
        """positions int64 [n], below 2^24 (float32 holds them exactly)."""
        angle = positions.float().unsqueeze(1) * self._frequencies  # [n, dim / 2]
        cos, sin = angle.cos(), angle.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return Angles(cos, sin, torch.cat((cos, cos), -1))


def frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Radians per position, float32 [dim / 2]."""
    plain = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if config.kind == "yarn":
        return _yarn(config, dim, plain)
    if config.kind == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = ((config.original_positions * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * plain / config.factor + smooth * plain
    if config.kind == "factors":
        return plain / torch.tensor(config.factors, dtype=torch.float32)
    return plain


def _yarn(config: RopeConfig, dim: int, plain: Tensor) -> Tensor:
    """Fast dimensions keep their frequency, slow ones are divided by the factor, a linear ramp lies in between."""

    def border(rotations: float) -> float:
        return dim * math.log(config.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = border(config.beta_fast), border(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp)


def rotate_pairs(x: Tensor, angles: Angles) -> Tensor:
    """Interleaved layout, (x0, x1), (x2, x3), ...; x [n, H, dim] or [n, dim]."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = _broadcast(angles, x)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, angles: Angles) -> Tensor:
    """Half-split layout, (x0, x[dim/2]), (x1, x[dim/2 + 1]), ...; x [n, H, dim] or [n, dim]."""
    if len(x) <= TILE_ROWS:
        return _rotate_halves(x, angles)
    out = torch.empty_like(x)
    for begin in range(0, len(x), TILE_ROWS):
        rows = slice(begin, begin + TILE_ROWS)
        out[rows] = _rotate_halves(x[rows], Angles(*(part[rows] for part in angles)))
    return out


def _rotate_halves(x: Tensor, angles: Angles) -> Tensor:
    half = x.shape[-1] // 2
    sin, cos = (angles.sin, angles.whole_cos) if x.dim() == 2 else (angles.sin.unsqueeze(1), angles.whole_cos.unsqueeze(1))
    wide = x.float()
    out = wide * cos
    out[..., :half].addcmul_(wide[..., half:], sin, value=-1)  # in place: a third of the memory traffic of joined halves
    out[..., half:].addcmul_(wide[..., :half], sin)
    return out.to(x.dtype)


def _broadcast(angles: Angles, x: Tensor) -> tuple[Tensor, Tensor]:
    return (angles.cos, angles.sin) if x.dim() == 2 else (angles.cos.unsqueeze(1), angles.sin.unsqueeze(1))
