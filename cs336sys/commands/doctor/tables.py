"""The table of ``doctor --ceilings``."""

from cs336sys.accounting.hardware import Ceilings, datasheet, peak_tflops
from cs336sys.tables.table import Column, Table, named_columns


def ceilings_table(ceilings: Ceilings) -> Table:
    """Build the table: what was measured, next to the datasheet."""
    rows = []
    for precision, tflops in ceilings.tflops.items():
        peak = peak_tflops(ceilings.gpu, precision.replace("tf32", "fp32"), tf32=precision == "tf32")
        rows.append({"what": f"product of matrices in {precision}", **_pair(tflops, peak), "unit": "TFLOP/s"})
    sheet = datasheet(ceilings.gpu)
    copy = _pair(ceilings.copy_gbps, None if sheet is None else sheet.memory_bytes_per_s / 1e9)
    rows.append({"what": "copy in memory, bytes read and written", **copy, "unit": "GB/s"})
    rows.append({"what": "launch of a small kernel, CPU time", "measured": ceilings.launch_us, "unit": "us"})
    rows.append({"what": "copy to another GPU, one way", "measured": ceilings.link_gbps, "unit": "GB/s"})
    columns = (
        *named_columns("what"),
        Column("measured", "measured", "value"),
        Column("datasheet", "datasheet", "value"),
        *named_columns(datasheet_percent="of the datasheet", unit="unit"),
    )
    notes = ("medians of repetitions, of random numbers; products: the faster of squares of 4096 and 8192",)
    return Table("ceilings", f"doctor: what {ceilings.gpu} reaches at most", columns, rows, notes)


def _pair(measured: float, datasheet: float | None) -> dict[str, float | None]:
    """Return the columns of a measured value and that of the datasheet, if it has one."""
    percent = None if datasheet is None else 100 * measured / datasheet
    return {"measured": measured, "datasheet": datasheet, "datasheet_percent": percent}
