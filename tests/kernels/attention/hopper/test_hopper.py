"""The Hopper kernels: what refuses them anywhere, and what they compute on a GPU that has them."""

import collections
import itertools
from types import SimpleNamespace

import pytest
import torch
from attention_checks import assert_exact, assert_matches_float64, on_hopper, problem_on_h200, random_inputs

from cs336sys.kernels.attention import choice, flash_attention, operators
from cs336sys.kernels.attention.hopper import schedule, settings
from cs336sys.kernels.attention.hopper.convert import convert_register_order_kernel, sum_pieces_kernel
from cs336sys.kernels.attention.hopper.plans import HopperBackwardPlan, HopperForwardPlan
from cs336sys.kernels.attention.hopper.schedule import (
    as_table_of_pieces,
    member_of_visit,
    piece_visits,
    query_tiles,
    tile_among_heads,
    tile_of_visit,
    tiles_of_window,
    visits,
)
from cs336sys.kernels.attention.problem import AttentionOptions, Operand

CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
HEAD_DIMS = pytest.mark.parametrize("head_dim", settings.HEAD_DIMS)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({}, (9, 0), None),
        ({}, (8, 0), "needs a GPU of compute capability 9.0 (H100, H200), NVIDIA A100 has 8.0"),
        ({"is_cuda": False, "device": "cpu"}, (9, 0), "runs on CUDA tensors, got cpu"),
        ({"dtype": torch.float32}, (9, 0), "takes float16 and bfloat16, got torch.float32"),
        ({"shape": torch.Size((1, 8, 80))}, (9, 0), "takes head dimension 16, 32, 64, 128 or 256, got 80"),
        ({"shape": torch.Size((2**18, 2**13, 64))}, (9, 0), "addresses fewer than 2^31 rows, got 262144 x 8192"),
    ],
    ids=["what it was made for", "another GPU", "cpu", "dtype", "head dim", "too long"],
)
def test_why_unavailable(changes, capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    query = {"is_cuda": True, "device": "cuda:0", "dtype": torch.bfloat16, "shape": torch.Size((2, 16, 1024, 64))}
    expected = reason and f"implementation 'hopper' {reason}"
    assert settings.why_unavailable(SimpleNamespace(**query | changes)) == expected


def schedule_of(plan):
    (schedule,) = (addition for addition in plan.additions if isinstance(addition, torch.Tensor))
    return schedule


# batch, heads of queries, heads that share keys, lengths, mask or window, head dimension, multiprocessors, cut or not
PLANS = {
    "one head in a group": (2, 3, 1, 5000, 5000, False, 128, 114, "some"),
    "more queries than keys": (1, 17, 1, 4100, 1020, False, 128, 132, "some"),
    "few keys": (2, 3, 1, 5000, 300, False, 128, 132, "all"),
    "one short head": (1, 2, 1, 700, 129, False, 128, 78, "all"),
    "pairs": (1, 4, 2, 1000, 1000, True, 64, 132, "all"),
    "one head of keys": (2, 7, 7, 700, 900, True, 256, 132, "all"),
    "full, one head of keys": (1, 32, 32, 500, 300, False, 16, 132, "all"),
    "last round": (1, 32, 4, 2000, 4400, False, 128, 132, "some"),
    "fill the GPU": (8, 8, 2, 1000, 2048, True, 128, 132, "none"),
    "window": (1, 3, 1, 1000, 900, 300, 128, 132, "none"),
    "window of grouped queries": (1, 8, 4, 1000, 900, 300, 256, 132, "all"),
    "at the end": (1, 8, 4, 500, 1030, "end", 64, 132, "all"),
}


@pytest.mark.parametrize("shape", PLANS.values(), ids=PLANS)
def test_a_backward_visits_every_tile_once_and_sums_every_piece_to_where_it_belongs(shape):
    """What its plan gives to the pass and to ``sum_pieces_kernel``, followed by their integer arithmetic."""
    batch, num_heads, group_size, num_queries, num_keys, mask, head_dim, num_multiprocessors, cut = shape
    is_causal, window = bool(mask), mask if type(mask) is int else None
    diagonal = num_keys - num_queries if mask == "end" else 0
    key_heads = num_heads // group_size
    of_queries, of_keys = (num_heads, num_queries), (key_heads, num_keys)
    # Query, key, value, gradient of the output, and the gradients of the first three. Values have rows of their own.
    shapes = (of_queries, 0), (of_keys, 0), (of_keys, 8), (of_queries, 0), (of_queries, 0), (of_keys, 0), (of_keys, 8)
    tensors = [
        torch.empty(batch, *shape, head_dim + more, dtype=torch.bfloat16, device="meta")[..., :head_dim]
        for shape, more in shapes
    ]
    operands = [Operand(tensor) for tensor in tensors]
    grads = operands[4:]
    options = {"group_size": group_size, "num_multiprocessors": num_multiprocessors}
    options |= {"window": window, "diagonal": diagonal}
    described = problem_on_h200(batch * num_heads, num_queries, head_dim, num_keys, is_causal, **options)
    plan = HopperBackwardPlan(described, operands[:4], operands[0], grads, CPU, False)
    backward, tensors_of_pass = plan.steps[1]
    table = schedule_of(plan).tolist()
    of_plan = dict(enumerate([*plan.tensor_names, *plan.additions]))
    key_rows, tiles_of_head = 64 if head_dim == 256 else 128, -(-num_queries // 64)
    window_tiles = tiles_of_window(window, 64, key_rows) if window else 0
    tiles_of_key_tile = [
        query_tiles(max(0, first_key - diagonal), num_queries, 64, is_causal, window_tiles)
        for first_key in range(0, num_keys, key_rows)
    ]
    assert backward.arguments[:3] == (key_heads, num_queries, num_keys)
    assert backward.arguments[6:10] == (group_size, window or 0, window_tiles, diagonal)
    config = backward.arguments[10]
    assert (config.ordered, config.grouped, config.cut) == (False, group_size > 1, cut != "none"), "any order, and cut"

    seen, items_of_pieces, whole = collections.Counter(), {}, []
    # In front of what programs share are their shares of it.
    first_work = backward.num_programs if head_dim < 256 else 0
    num_works = sum(count for count, _ in table[:first_work]) or backward.num_programs
    for pieces_of_item, at in table[first_work : first_work + num_works]:
        item = tuple(table[at])
        number, count = divmod(pieces_of_item, 256)
        tiles = tiles_of_key_tile[item[0]]
        for visit in range(*piece_visits(*visits(*tiles, group_size), number % count, count)):
            member, tile = member_of_visit(visit, *tiles), tile_of_visit(visit, *tiles)
            assert tile_among_heads(visit, *tiles, tiles_of_head) == member * tiles_of_head + tile
            seen[item[0], item[1] * group_size + member, tile] += 1
        if count == 1:
            whole.append(item)
        else:
            items_of_pieces[number] = item
    items = set(itertools.product(range(len(tiles_of_key_tile)), range(batch * key_heads)))
    assert seen == collections.Counter(
        (key_tile, head, tile)
        for key_tile, tiles in enumerate(tiles_of_key_tile)
        for head in range(batch * num_heads)
        for tile in range(*tiles)
    )
    assert (len(whole) > 0, len(items_of_pieces) > 0) == {"none": (1, 0), "some": (1, 1), "all": (0, 1)}[cut]
    num_tiles = key_rows // 64
    halves = [(item, half) for item in whole for half in range(num_tiles)]
    if cut != "none":
        summing, tensors_of_sum = plan.steps[3]
        pieces, grad_key, grad_value, schedule = (of_plan[number] for number in tensors_of_sum)
        assert of_plan[tensors_of_pass[-2]] is pieces
        assert pieces.shape == (2 * key_rows * len(items_of_pieces), head_dim)
        grad_key_strides, grad_value_strides, first_item, num_pieces, heads, keys = summing.arguments[:6]
        assert (grad_key_strides, grad_value_strides) == tuple(one.row_strides for one in grads[1:])
        assert (grad_key, grad_value) == ("grad_key", "grad_value")
        assert (heads, keys, schedule.tolist()) == (key_heads, num_keys, table)
        dim, tiles_of_item, columns, _ = summing.arguments[6:]
        assert (dim, tiles_of_item) == (head_dim, num_tiles)
        parts = collections.Counter()
        for program in range(summing.num_programs):
            item, half = divmod(program // (head_dim // columns), num_tiles)
            whole_item = tuple(table[first_item + item])
            assert {items_of_pieces[item * num_pieces + piece] for piece in range(num_pieces)} == {whole_item}
            parts[whole_item, half] += columns
        assert set(parts.values()) == {head_dim}
        halves += parts
    assert sorted(halves) == sorted(itertools.product(items, range(num_tiles)))


@pytest.mark.parametrize(("num_sequences", "chosen"), [(16, True), (1, False)])
def test_auto_asks_for_the_shape_and_never_forces_a_copy(num_sequences, chosen, monkeypatch):
    """As on an H200, with tensors on the CPU; head dimension 64 in rows of 65 elements cannot be addressed by TMA."""
    monkeypatch.setattr(settings, "why_unavailable", lambda query: None)

    def problem_on_hopper(query, key, operands, options):
        fits = all(operand.fits_tma for operand in operands)
        sizes = query.shape[:-2].numel(), query.shape[-2], query.shape[-1], key.shape[-2]
        return problem_on_h200(*sizes, tma_allowed=fits)

    monkeypatch.setattr(choice, "make_problem", problem_on_hopper)
    query = torch.empty(1, num_sequences, 16384, 65, dtype=torch.bfloat16, device="meta")
    whole, narrow = query.new_empty(1, num_sequences, 16384, 64), query[..., :64]

    def takes_hopper(kernels, key):
        plan = choice.forward_plan((whole, key, whole, whole), AttentionOptions(True, kernels=kernels))
        return isinstance(plan, HopperForwardPlan)

    def takes_hopper_backward(out, grad_key):
        tensors, grads = (whole, whole, whole, out, whole), (whole, grad_key, whole)
        return isinstance(
            choice.backward_plan(tensors, grads, AttentionOptions(True, kernels="auto")), HopperBackwardPlan
        )

    assert takes_hopper("auto", whole) == takes_hopper_backward(whole, whole) == chosen
    assert takes_hopper("hopper", narrow)
    refused = takes_hopper("auto", narrow), takes_hopper("triton", whole)
    assert not any((*refused, takes_hopper_backward(narrow, whole), takes_hopper_backward(whole, narrow)))


@pytest.mark.parametrize(("head_dim", "columns"), [(16, 16), (128, 64)])
def test_converts_sums_that_lie_as_a_matrix_product_leaves_them_in_registers(head_dim, columns, device):
    num_heads, num_queries = 3, 100
    expected = torch.randn(2, num_heads, num_queries, head_dim, device=device)
    padded = torch.nn.functional.pad(expected, (0, 0, 0, 28)).view(12, 64, head_dim)
    sums = torch.stack(
        [in_register_order(padded[..., part : part + columns]) for part in range(0, head_dim, columns)], 1
    )
    grad_query = torch.empty_like(expected)
    convert_register_order_kernel[(12,)](
        sums, grad_query, grad_query.stride()[:3], 2, num_heads, num_queries, 0.5, head_dim, columns, False
    )
    torch.testing.assert_close(grad_query, expected / 2)


def in_register_order(tiles):
    """(n, 64, columns) as a matrix product leaves each: eight columns, warp, lane, register."""
    num_eights = tiles.shape[-1] // 8
    ordered = torch.empty(len(tiles), num_eights, 4, 32, 4, device=tiles.device)
    for eight, warp, lane, register in itertools.product(range(num_eights), range(4), range(32), range(4)):
        row = 16 * warp + lane // 4 + 8 * (register // 2)
        ordered[:, eight, warp, lane, register] = tiles[:, row, 8 * eight + 2 * (lane % 4) + register % 2]
    return ordered


@pytest.mark.parametrize(
    ("num_tiles", "head_dim", "columns", "num_pieces", "at_a_time"),
    [(2, 16, 16, 2, 1), (2, 32, 8, 3, 2), (1, 32, 16, 3, 8), (1, 16, 16, 9, 4)],
)
def test_pieces_of_grad_key_and_value_are_summed(num_tiles, head_dim, columns, num_pieces, at_a_time, device):
    """Two heads of as many keys as two items have, but 20: the first item is whole, the others are in pieces."""
    num_whole, key_rows = 1, 64 * num_tiles
    num_keys = 2 * key_rows - 20
    items = [(tile, sequence) for tile in range(2) for sequence in range(2)]
    table = as_table_of_pieces(items, num_whole, num_pieces)
    schedule = torch.tensor(table, dtype=torch.int32, device=device)
    shares = torch.randn(3, num_pieces, 2, key_rows, head_dim, device=device)
    pieces = in_register_order(shares.view(-1, 64, head_dim))
    expected = torch.full((2, 1, 2, 2 * key_rows, head_dim), -1.0, device=device)  # -1: of whole items, not written
    for (tile, sequence), share in zip(items[num_whole:], shares.sum(1), strict=True):
        expected[:, 0, sequence, key_rows * tile : key_rows * (tile + 1)] = share
    grads = torch.full((2, 1, 2, num_keys, head_dim), -1.0, device=device)
    strides = grads[0].stride()[:3]
    first_item = len(table) - len(items) + num_whole
    sizes = first_item, num_pieces, 2, num_keys, head_dim, num_tiles, columns, at_a_time
    grid = (3 * num_tiles * head_dim // columns,)
    sum_pieces_kernel[grid](pieces, grads[0], grads[1], schedule, strides, strides, *sizes)
    torch.testing.assert_close(grads, expected[..., :num_keys, :])


@on_hopper
@CAUSAL
@HEAD_DIMS
@pytest.mark.parametrize(("dtype", "heads"), [(torch.float16, (1, 1)), (torch.bfloat16, (6, 2))], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_exact_integer_data(seed, dtype, heads, head_dim, is_causal, device):
    """The assembler of triton 3.6 to 3.8 may reuse a register before an asynchronous product has read it."""
    num_queries, num_keys = [(1000, 1000), (300, 1300), (1300, 300), (4096, 4096)][seed % 4]
    assert_exact(num_queries, num_keys, head_dim, is_causal, dtype, device, seed, "hopper", *heads)


@on_hopper
@pytest.mark.parametrize(
    ("implementation", "leading", "group_size", "length", "head_dim", "deterministic"),
    [
        *(("hopper", (2, 2), 1, 300, head_dim, False) for head_dim in settings.HEAD_DIMS),
        ("auto", (8, 16), 1, 1024, 64, False),
        ("auto", (4, 16), 4, 2048, 128, True),
    ],
)
def test_takes_its_kernels_in_both_passes(
    implementation, leading, group_size, length, head_dim, deterministic, device, fresh_plans
):
    inputs = random_inputs(leading, length, length, head_dim, torch.bfloat16, device, group_size=group_size)
    flash_attention(*inputs, True, deterministic=deterministic, implementation=implementation).sum().backward()
    assert [type(plan).__name__ for plan in operators._plans.values()] == ["HopperForwardPlan", "HopperBackwardPlan"]


# (batch, heads of queries), how many share a head of keys, and lengths: ragged, few queries, few keys, one tile.
GROUPED_SHAPES = {
    "one query and key": ((2, 3), 1, 1, 1),
    "no groups": ((2, 3), 1, 333, 517),
    "no groups, few keys": ((2, 3), 1, 700, 17),
    "no groups, few queries": ((2, 3), 1, 17, 700),
    "no groups, one tile": ((2, 3), 1, 64, 128),
    "no groups, more than multiprocessors": ((20, 16), 1, 400, 400),
    "no groups, several times as many": ((4, 16), 1, 1000, 1000),
    "2": ((2, 4), 2, 333, 517),
    "4": ((1, 8), 4, 700, 300),
    "8, one head of keys": ((1, 8), 8, 300, 1000),
    "3": ((3, 6), 3, 129, 129),
    "32, one head of keys": ((1, 32), 32, 64, 200),
    "2, one query": ((2, 8), 2, 1, 300),
    "4, one key": ((1, 4), 4, 300, 1),
    "4, more than multiprocessors": ((12, 16), 4, 400, 400),
}

# What is done with the items of the backward pass, in the place of ``cut_all``.
CUTS = {
    "whole": lambda items: (len(items), 1),
    "in pieces": lambda items: (0, 3),
    "both": lambda items: (len(items) // 2, 4),
    "more pieces than visits": lambda items: (0, 32),
}


def grouped_inputs(shape, head_dim, device, dtype=torch.bfloat16):
    leading, group_size, num_queries, num_keys = shape
    return random_inputs(leading, num_queries, num_keys, head_dim, dtype, device, group_size=group_size)


@on_hopper
@HEAD_DIMS
@CAUSAL
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", GROUPED_SHAPES.values(), ids=GROUPED_SHAPES)
def test_lengths_and_grouped_queries(shape, deterministic, is_causal, head_dim, device, poisoned_empty):
    inputs = grouped_inputs(shape, head_dim, device)
    assert_matches_float64(inputs, is_causal, kernels="hopper", deterministic=deterministic)


@on_hopper
@HEAD_DIMS
@CAUSAL
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_grouped_queries_however_items_are_cut(
    cut, is_causal, head_dim, device, monkeypatch, fresh_plans, poisoned_empty
):
    monkeypatch.setattr(schedule, "cut_all", lambda items, *others: cut(items))
    inputs = grouped_inputs(((2, 6), 3, 333, 300), head_dim, device)
    assert_matches_float64(inputs, is_causal, kernels="hopper")


# (batch, heads of queries), how many share a head of keys, lengths, and a window: of less than a tile, across several,
# behind all keys of many queries, and of more programs than multiprocessors.
WINDOWS = {
    "1": ((2, 3), 1, 300, 300, 1),
    "40": ((2, 3), 1, 333, 517, 40),
    "300": ((1, 2), 1, 1000, 1000, 300),
    "few keys": ((1, 2), 1, 900, 200, 129),
    "4 heads": ((1, 8), 4, 700, 650, 200),
    "8 heads, few keys": ((1, 8), 8, 900, 200, 150),
    "more than multiprocessors": ((12, 16), 4, 600, 600, 257),
}


@on_hopper
@HEAD_DIMS
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", WINDOWS.values(), ids=WINDOWS)
def test_windows(shape, deterministic, head_dim, device, poisoned_empty):
    *sizes, window = shape
    inputs = grouped_inputs(sizes, head_dim, device)
    assert_matches_float64(inputs, True, kernels="hopper", window=window, deterministic=deterministic)
