"""The gradient of an embedding's rows against float64, on the CPU through Triton's interpreter."""

import pytest
import torch
from kernel_checks import TOLERANCES, dtype_id

from cs336sys.kernels import embedding
from cs336sys.kernels.embedding import EmbeddingRows, embedding_rows

pytestmark = pytest.mark.usefixtures("poisoned_empty")

ROWS = 7


def expected_gradient(ids, grad):
    total = torch.zeros(ROWS, grad.shape[-1], dtype=torch.float64, device=grad.device)
    return total.index_add_(0, ids.reshape(-1) % ROWS, grad.reshape(-1, grad.shape[-1]).double())


def gradient(ids, grad, dtype=torch.float32):
    weight = torch.randn(ROWS, grad.shape[-1], dtype=dtype, device=grad.device, requires_grad=True)
    rows = EmbeddingRows.apply(weight, ids)
    assert torch.equal(rows, weight[ids])
    return torch.autograd.grad(rows, weight, grad.to(dtype))[0]


@pytest.mark.parametrize("is_compared", [True, False], ids=["compared", "sorted"])
@pytest.mark.parametrize(
    "ids",
    [
        [[3]],
        [[5] * 19],
        [[6, 0, 3], [0, 6, 0]],
        [[-1, 6, 2, -ROWS, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, -5, 2, 1, 2, 3, 2]],
    ],
    ids=["one token", "one id, more often than a tile", "unused rows", "negative ids"],
)
@pytest.mark.parametrize("width", [5, 32])
def test_rows_get_the_sums_of_their_tokens(ids, width, is_compared, device, monkeypatch):
    if not is_compared:
        monkeypatch.setattr(embedding, "MOST_COMPARED", 0)
    # Several programs and several loops over what they compare, and columns of more than one tile.
    monkeypatch.setattr(embedding, "RANKED_TOKENS", 4)
    monkeypatch.setattr(embedding, "COMPARED_TOKENS", 8)
    monkeypatch.setattr(embedding, "COLUMN_TILE", 16)
    torch.manual_seed(0)
    ids = torch.tensor(ids, device=device)
    # A gradient that does not lie row by row.
    grad = torch.randn(width, *ids.shape, device=device).movedim(0, -1)
    torch.testing.assert_close(gradient(ids, grad).double(), expected_gradient(ids, grad), **TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
def test_sums_are_rounded_once(dtype, device):
    ids = torch.zeros(3, 11, dtype=torch.int64, device=device)
    # In half precision each addition to 1 would be rounded off.
    grad = torch.full((3, 11, 2), torch.finfo(dtype).eps / 4, device=device)
    grad[0, 0] = 1
    assert gradient(ids, grad, dtype)[0].tolist() == [1 + 8 * torch.finfo(dtype).eps] * 2


def test_no_tokens_give_zeros(device):
    ids = torch.empty(0, 4, dtype=torch.int64, device=device)
    assert torch.equal(gradient(ids, torch.empty(0, 4, 3, device=device)), torch.zeros(ROWS, 3, device=device))


def test_second_derivatives_are_refused(device):
    weight = torch.randn(ROWS, 2, device=device, requires_grad=True)
    rows = EmbeddingRows.apply(weight, torch.tensor([1, 1], device=device))
    with pytest.raises(RuntimeError, match="EmbeddingRows is differentiable once"):
        torch.autograd.grad(rows.sum(), weight, create_graph=True)


def test_on_a_cpu_it_is_torchs():
    weight = torch.randn(ROWS, 2, requires_grad=True)
    assert type(embedding_rows(weight, torch.tensor([1, 1])).grad_fn).__name__ == "IndexBackward0"


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2048, 20_000])
def test_the_same_bits_every_time(num_tokens):
    torch.manual_seed(0)
    ids = torch.randint(10_000, (num_tokens,), device="cuda")
    ids[::3] = 7
    weight = torch.randn(10_000, 768, device="cuda", requires_grad=True)
    grad = torch.randn(num_tokens, 768, device="cuda")
    first, *others = (torch.autograd.grad(embedding_rows(weight, ids), weight, grad)[0] for _ in range(4))
    expected = torch.zeros(10_000, 768, device="cuda", dtype=torch.float64).index_add_(0, ids, grad.double())
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=2e-4)
    assert all(torch.equal(first, other) for other in others)
