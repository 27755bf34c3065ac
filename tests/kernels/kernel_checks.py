"""Values and gradients of a kernel by name, set against its reference in float64 or in its own dtype."""

import torch

# Inputs are exact in float64, so these are the rounding of float32 sums and of stored results: half a unit in the last
# place on a GPU, a whole one in the interpreter, which cuts bfloat16 off instead of rounding it. Absolute ones are for
# what sums cancel to, and are of results near 1.
TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1.6e-2},
}
DTYPES = tuple(TOLERANCES)

# Of a contiguous x (batches, rows, columns).
LAYOUTS = {
    "transposed": lambda x: x.flatten(0, 1).T.contiguous().T.unflatten(0, x.shape[:2]),
    "transposed-in-batches": lambda x: x.mT.contiguous().mT,
    "every-other-column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows-of-a-wider-tensor": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "half-of-a-projection": lambda x: torch.cat([x, x], dim=-1).chunk(2, dim=-1)[1],
    "expanded": lambda x: x[:1, :1].expand_as(x),
}


def random(device, *shapes, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def shape_id(shape):
    return "x".join(map(str, shape))


def dtype_id(dtype):
    return str(dtype).removeprefix("torch.")


def results(function, inputs, grad_outputs):
    """Outputs of ``function(**inputs)``, and the gradients of the inputs that are floating point tensors, by name."""
    inputs = {
        name: value.detach().requires_grad_() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.requires_grad}
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), grad_outputs)
    return {f"output {number}": output.detach() for number, output in enumerate(outputs)} | {
        f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def as_float64(values):
    def convert(value):
        return value.double() if torch.is_tensor(value) and value.is_floating_point() else value

    return (
        {name: convert(value) for name, value in values.items()}
        if isinstance(values, dict)
        else [convert(value) for value in values]
    )


def assert_matches_float64(function, reference, inputs, grad_outputs, scale=1.0):
    """Each result has the reference's shape, the dtype of what it is a gradient of, and the value within its rounding.

    ``scale``: how many times the tolerance of its dtype, or of the least precise input, where sums are long.
    """
    actual = results(function, inputs, grad_outputs)
    expected = results(reference, as_float64(inputs), as_float64(grad_outputs))
    dtypes = [value.dtype for value in inputs.values() if torch.is_tensor(value) and value.is_floating_point()]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    for name, tensor in actual.items():
        if name.startswith("grad "):
            assert tensor.dtype == inputs[name.removeprefix("grad ")].dtype, name
        elif len(set(dtypes)) == 1:
            assert tensor.dtype == dtypes[0], name
    tolerance = {kind: scale * value for kind, value in TOLERANCES[coarsest].items()}
    torch.testing.assert_close({name: tensor.double() for name, tensor in actual.items()}, expected, **tolerance)


def assert_equal_to_reference(function, reference, inputs, grad_outputs):
    """In float32, NaN where the reference is NaN and infinite where it is."""
    actual, expected = (results(compute, inputs, grad_outputs) for compute in (function, reference))
    torch.testing.assert_close(actual, expected, equal_nan=True)
