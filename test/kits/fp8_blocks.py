"""FP8 matrices with one scale per 128x128 block, as checkpoints store them: plain and slow, independent of the engine."""
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
FP8_MAX = 448.0


def quantise(weight: Tensor, powers_of_two: bool) -> tuple[Tensor, Tensor]:
    """weight [out, in]; returns float8_e4m3fn [out, in] and float32 scales [ceil(out / 128), ceil(in / 128)]."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = tiles.abs().amax((1, 3)).clamp_min(1e-10) / FP8_MAX
    if powers_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    quantised = (tiles / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).view(padded.shape)[:rows, :columns]
    return quantised.to(torch.float8_e4m3fn).contiguous(), scales.contiguous()


def dequantised(data: Tensor, scales: Tensor) -> Tensor:
    """float32 [out, in]; the last block of a row or column is cut short."""
    rows, columns = data.shape
    return data.float() * scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
