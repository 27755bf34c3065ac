"""The table of ``doctor --ceilings``."""

from cs336sys.accounting.hardware import Ceilings, datasheet, peak_tflops
from cs336sys.report.table import Column, Table


def ceilings_table(found: Ceilings) -> Table:
    """Build the table: what was measured, beside the datasheet."""
    rows = []
    for precision, tflops in found.tflops.items():
        peak = peak_tflops(found.gpu, precision.replace("tf32", "fp32"), tf32=precision == "tf32")
        rows.append({"what": f"product of matrices in {precision}", **_pair(tflops, peak), "unit": "TFLOP/s"})
    sheet = datasheet(found.gpu)
    rows.append(
        {
            "what": "copy in memory, bytes read and written",
            **_pair(found.copy_gbps, None if sheet is None else sheet.memory_bytes_per_s / 1e9),
            "unit": "GB/s",
        }
    )
    rows.append({"what": "launch of a small kernel, CPU time", "measured": found.launch_us, "unit": "us"})
    rows.append({"what": "copy to another GPU, one way", "measured": found.link_gbps, "unit": "GB/s"})
    columns = (
        Column("what", "what"),
        Column("measured", "measured", "value"),
        Column("datasheet", "datasheet", "value"),
        Column("datasheet_percent", "of the datasheet", "percent"),
        Column("unit", "unit"),
    )
    notes = ("medians of repetitions, of random numbers; products: the faster of squares of 4096 and 8192",)
    return Table("ceilings", f"doctor: what {found.gpu} reaches at most", columns, rows, notes)


def _pair(measured: float, datasheet: float | None) -> dict[str, float | None]:
    part = None if datasheet is None else 100 * measured / datasheet
    return {"measured": measured, "datasheet": datasheet, "datasheet_percent": part}
