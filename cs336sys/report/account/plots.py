"""Pictures of ``account`` (matplotlib, written to a file)."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cs336sys.accounting.derivation import number_of
from cs336sys.accounting.memory import GIB
from cs336sys.accounting.parallelism import PASSES, Layer, best_split, communication_s, layer_flops, most_devices
from cs336sys.accounting.sharding.step import ShardedStep, rank_peak
from cs336sys.report.outputs import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POINTS = 121

_BAR_NAMES = {"optimizer_state": "optimizer state", "activations": "activations and buffers"}


def plot_parallel(strategies: Sequence[str], layer: Layer, path: Path) -> None:
    """Computing and communication time over the devices, forward above backward, and where they cross."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 3.6 * len(strategies), 6.5), layout="constrained")
    axes = figure.subplots(len(PASSES), len(strategies), squeeze=False, sharex="col")
    for column, strategy in enumerate(strategies):
        curves = {which: _curves(strategy, layer, which) for which in PASSES}
        counts = _counts(8 * max(crossing for which in PASSES for _, crossing in curves[which].values()))
        for drawing, which in zip(axes[:, column], PASSES, strict=True):
            _draw_pass(drawing, layer, which, curves[which], counts)
        axes[0, column].set_title(strategy)
        axes[-1, column].set_xlabel("devices")
    for drawing, which in zip(axes[:, 0], PASSES, strict=True):
        drawing.set_ylabel(f"{which}, ms")
    rates = f"C {layer.flops_per_s:g} FLOP/s, W {layer.bytes_per_s:g} B/s"
    figure.suptitle(f"B {layer.batch}, D {layer.d_model}, D_FF {layer.d_ff}\n{rates}", fontsize=10)
    write_figure(figure, path)


def plot_rank_memory(steps: Sequence[ShardedStep], path: Path) -> None:
    """A bar for each way of training, stacked by component: what is there at the peak."""
    from matplotlib.figure import Figure

    peaks = [rank_peak(step) for step in steps]
    labels = [_bar_label(step, steps) for step in steps]
    figure = Figure(figsize=(2 + 1.1 * len(steps), 5), layout="constrained")
    drawing = figure.subplots()
    bottoms = [0.0] * len(peaks)
    for component in ("parameters", "gradients", "optimizer_state", "activations"):
        heights = [getattr(peak, component) / GIB for peak in peaks]
        drawing.bar(range(len(peaks)), heights, bottom=bottoms, label=_BAR_NAMES.get(component, component))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for position, total in enumerate(bottoms):
        drawing.annotate(f"{total:.1f}", (position, total), ha="center", va="bottom", fontsize=9)
    drawing.set_xticks(range(len(labels)), labels, fontsize=8)
    drawing.set_ylabel("memory of a rank at its peak, GiB")
    drawing.legend(fontsize=8)
    write_figure(figure, path)


def _bar_label(step: ShardedStep, steps: Sequence[ShardedStep]) -> str:
    """The strategy, and below it what differs between the bars."""

    def words(one: ShardedStep) -> tuple[str, ...]:
        size = one.size
        return size.name, f"context {size.context}", one.precision, one.mode, f"{one.world_size} ranks"

    columns = zip(*map(words, steps), strict=True)
    differing = [index for index, values in enumerate(columns) if len(set(values)) > 1]
    return "\n".join([step.strategy, *(words(step)[index] for index in differing)])


def _draw_pass(drawing: "Axes", layer: Layer, which: str, curves: dict, counts: Sequence[float]) -> None:
    """One strategy's pass: computing, each communication time, and the number of devices where they cross."""

    def computing_ms(devices: float) -> float:
        return 1e3 * number_of(layer_flops(layer, which, fsdp=devices) / layer.flops_per_s)

    drawing.plot(counts, [computing_ms(n) for n in counts], color="C0", label="computing")
    for number, (name, (seconds, crossing)) in enumerate(curves.items(), start=1):
        # One device communicates nothing, which a logarithmic axis cannot show.
        drawing.plot(counts[1:], [1e3 * seconds(n) for n in counts[1:]], color=f"C{number}", label=name)
        drawing.axvline(crossing, color=f"C{number}", linestyle=":", linewidth=1)
        drawing.annotate(
            f"{crossing:.4g}",
            (crossing, computing_ms(crossing)),
            textcoords="offset points",
            xytext=(4, 6),
            color=f"C{number}",
            fontsize=9,
            # Other curves may cross the number.
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5},
        )
    drawing.set_xscale("log", base=2)
    drawing.set_yscale("log")
    drawing.grid(alpha=0.3)
    drawing.legend(fontsize=7)


def _curves(strategy: str, layer: Layer, which: str) -> dict[str, tuple[Callable[[float], float], float]]:
    """Name of each communication time: seconds as a function of the devices, and where it crosses computing."""

    def seconds(devices: float, overlapped: bool) -> float:
        fsdp, tp = {"dp": (devices, 1), "fsdp": (devices, 1), "tp": (1, devices)}.get(strategy) or best_split(
            layer, devices, which, overlapped=overlapped
        )
        return number_of(communication_s(strategy, layer, which, fsdp=fsdp, tp=tp, overlapped=overlapped))

    names = {"communication": True}
    if strategy == "fsdp-tp":
        names = {"axes overlapped": True, "axes sharing the network": False}
    return {
        name: (
            partial(seconds, overlapped=overlapped),
            number_of(most_devices(strategy, layer, which, overlapped=overlapped)),
        )
        for name, overlapped in names.items()
        if (strategy, which) != ("dp", "forward")
    }


def _counts(most: float) -> list[float]:
    """Numbers of devices from 1 to ``most``, evenly spaced on a logarithmic axis."""
    return [most ** (point / (_POINTS - 1)) for point in range(_POINTS)]
