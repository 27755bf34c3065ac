"""Comparing dictionaries of tensors, and state dicts of optimizers."""

import torch


def assert_same(left, right, **tolerance):
    """Two dictionaries of tensors (or None) are equal, bitwise unless a tolerance is given."""
    assert left.keys() == right.keys()
    for name in left:
        if left[name] is None or right[name] is None:
            assert left[name] is right[name], name
        else:
            torch.testing.assert_close(left[name], right[name], **{"rtol": 0, "atol": 0} | tolerance, msg=name)


def assert_same_state(state, expected, **tolerance):
    """Two state dicts hold the same of every parameter and have the same groups."""
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, kept in state["state"].items():
        others = expected["state"][index]
        assert kept.keys() == others.keys()
        for key, value in kept.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(
                    value, others[key], **{"rtol": 0, "atol": 0} | tolerance, msg=f"{key} of {index}"
                )
            else:
                assert value == others[key]


def dict_of(**values):
    """Tensors of three equal numbers, or None."""
    return {name: None if value is None else torch.full((3,), value) for name, value in values.items()}
