import pytest

from cs336sys.errors import UsageError
from cs336sys.settings.sizes import SIZES, choose_size
from cs336sys.settings.training import Workload


def test_every_size_keeps_the_rules_that_custom_ones_must():
    for name, size in SIZES.items():
        assert choose_size(name) == size


def test_given_fields_take_the_place_of_the_sizes_own():
    size = choose_size("small", context=128, batch_size=2, vocab_size=50)
    assert (size.name, size.context, size.batch_size, size.vocab_size) == ("small", 128, 2, 50)


def test_a_changed_shape_is_called_after_its_fields():
    assert choose_size("small", num_layers=2).name == "768/3072/2/12"
    assert choose_size("small", num_layers=12).name == "small"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: choose_size("small", context=0), "--context 0: must be at least 1"),
        (lambda: choose_size("small", batch_size=-3), "--batch-size -3: must be at least 1"),
        (
            lambda: Workload(SIZES["tiny"], mode="backward"),
            "unknown mode 'backward': choose from forward, forward-backward, train; did you mean forward-backward?",
        ),
        (lambda: Workload(SIZES["tiny"], steps=0), "--steps 0: must be at least 1"),
        (lambda: Workload(SIZES["tiny"], warmup=-1), "--warmup -1: must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(make, sentence):
    with pytest.raises(UsageError) as refused:
        make()
    assert str(refused.value) == sentence


def test_configuration_of_8b_does_not_depend_on_its_default_precision():
    workload = Workload(SIZES["8b"], precision="fp32")
    assert Workload.from_configuration(workload.configuration()).precision == "fp32"
    assert workload.configuration()["precision"] == "fp32"
