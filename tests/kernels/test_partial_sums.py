import pytest
import torch

from cs336sys.kernels.operators import sum_of_partials

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (128, 32), (300, 70), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_integers_are_added_exactly(shape, dtype, device):
    torch.manual_seed(0)
    partials = torch.randint(-1, 2, shape, device=device).float()
    total = sum_of_partials(partials, dtype)
    assert total.dtype == dtype
    assert torch.equal(total.double(), partials.double().sum(0))


def test_half_precision_is_rounded_once(device):
    # Ones added up in float16 would stay at 2048.
    partials = torch.ones(3000, 2, device=device)
    assert sum_of_partials(partials, torch.float16).tolist() == [3000, 3000]
