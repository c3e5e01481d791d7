"""Linear layers: stored forms, joined rows, short FP8 blocks."""
import pytest
import torch
from torch import Tensor

from kits.fp8_blocks import dequantised, quantise
from sglane.layers.linear import MAX_WIDENED, BlockScaledProduct, Linear, PackedProduct, PlainProduct, WidenedProduct, product
from sglane.layers.weights import Matrix, concat_rows, dense, dequantise

SIZES = [(1, 1), (64, 192), (128, 128), (129, 127), (160, 300), (576, 200)]


def fp8(rows: int, columns: int, seed: int = 0) -> Matrix:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return Matrix(*quantise(weight, powers_of_two=False))


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_fp8_blocks_with_short_ends(rows, columns):
    matrix = fp8(rows, columns)
    assert matrix.scales is not None and matrix.scales.shape == (-(-rows // 128), -(-columns // 128))
    expected = dequantised(matrix.data, matrix.scales)
    assert torch.equal(dequantise(matrix.data, matrix.scales, torch.float32), expected)
    assert torch.equal(dequantise(matrix.data, matrix.scales, torch.bfloat16), expected.to(torch.bfloat16))


def test_scale_of_each_block_reaches_its_values_only():
    ones = torch.ones(160, 130).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = dequantise(ones, scales, torch.float32)
    assert found[127, 127] == 1 and found[127, 128] == 2 and found[128, 127] == 3 and found[159, 129] == 4


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_block_scaled_product(rows, columns):
    """The form that stays FP8 in memory gives what the dequantised weight gives."""
    matrix = fp8(rows, columns)
    x, bias = torch.randn(5, columns), torch.randn(rows)
    layer = Linear(matrix, bias)
    assert isinstance(product(matrix, bias), BlockScaledProduct)
    assert torch.allclose(layer(x), x @ dense(matrix, torch.float32).T + bias, atol=1e-5)


@pytest.mark.parametrize("rows", [(128, 256, 65), (64, 64), (200, 128)])
def test_joined_fp8_rows(rows):
    """Aligned parts keep FP8; others have no common grid of blocks. The values are the same either way."""
    parts = [fp8(count, 192, seed) for seed, count in enumerate(rows)]
    joined = concat_rows(parts, torch.float32)
    assert (joined.scales is not None) == all(count % 128 == 0 for count in rows[:-1])
    assert torch.equal(dense(joined, torch.float32), torch.cat([dense(part, torch.float32) for part in parts]))


def test_joined_mixed_forms():
    parts = [fp8(128, 64), Matrix(torch.randn(10, 64))]
    joined = concat_rows(parts, torch.float32)
    assert joined.scales is None
    assert torch.equal(joined.data[:128], dense(parts[0], torch.float32)) and torch.equal(joined.data[128:], parts[1].data)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_agree(num_rows, dtype):
    """Packed and plain products, with and without bias, also for rows that are a slice of something wider."""
    weight, wide = torch.randn(96, 160).to(dtype), torch.randn(num_rows, 320).to(dtype)
    x = wide[:, 100:260]
    for bias in (None, torch.randn(96).to(dtype)):
        expected: Tensor = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.25
        for kind in (PlainProduct, PackedProduct, WidenedProduct):
            found = kind(weight, bias)(x)
            assert found.shape == (num_rows, 96) and found.dtype == dtype
            assert torch.allclose(found.double(), expected, atol=tolerance), kind


def test_form_decides():
    assert isinstance(product(Matrix(torch.randn(4, 4)), None), PlainProduct)
    assert isinstance(product(Matrix(torch.randn(512, 512)), None), PackedProduct)
    packs = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert isinstance(product(Matrix(torch.randn(4, 4).bfloat16()), None), WidenedProduct)
    assert isinstance(product(Matrix(torch.randn(2, MAX_WIDENED).bfloat16()), None), PackedProduct if packs else PlainProduct)
    with pytest.raises(ValueError, match="block scales"):
        Linear(Matrix(torch.zeros(4, 4).to(torch.float8_e4m3fn)))


def test_copies_are_counted():
    """In bytes of the run type, so that the memory budget knows them."""
    assert Linear(Matrix(torch.randn(4, 4))).copied_bytes == 0
    assert Linear(Matrix(torch.randn(4, 4).bfloat16())).copied_bytes == 4 * 4 * 4
    assert Linear(Matrix(torch.randn(512, 512))).copied_bytes == 512 * 512 * 4
