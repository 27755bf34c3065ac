"""Peak matrix-multiplication rates of GPUs, and model FLOPs utilization (MFU)."""

import re

_COLUMNS = ("fp32", "tf32", "bf16", "fp16")

# Name as torch.cuda.get_device_name gives it (a regular expression that must match all of it), and the dense TFLOP/s
# of each column (fp32 without tensor cores). A name must match whole because near names are other GPUs: "NVIDIA
# GB200", "GeForce RTX 4090 Laptop GPU", "RTX 5090 D", or a MIG slice ("NVIDIA H100 80GB HBM3 MIG 1g.10gb").
# Data-centre datasheets print rates with 2:4 sparsity; those were halved. GeForce tensor cores run fp16 with fp32
# accumulation at half the rate of fp16 accumulation; cuBLAS accumulates in fp32, so that rate stands here.
_PEAK_TFLOPS = (
    # NVIDIA A100 Tensor Core GPU datasheet (same rates for SXM4 and PCIe).
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", (19.5, 156.0, 312.0, 312.0)),
    # NVIDIA H100 datasheet, PCIe; unrounded dense figures in the H100 architecture whitepaper, table 2.
    (r"NVIDIA H100 PCIe", (51.2, 378.0, 756.0, 756.0)),
    # NVIDIA H100 NVL datasheet.
    (r"NVIDIA H100 NVL", (60.0, 417.5, 835.5, 835.5)),
    # NVIDIA H100 datasheet, SXM; unrounded dense figures in the H100 architecture whitepaper, table 2.
    (r"NVIDIA H100 80GB HBM3", (66.9, 494.7, 989.4, 989.4)),
    # NVIDIA H200 datasheet, NVL.
    (r"NVIDIA H200 NVL", (60.0, 417.5, 835.5, 835.5)),
    # NVIDIA H200 datasheet, SXM: the H100 SXM's rates.
    (r"NVIDIA H200", (66.9, 494.7, 989.4, 989.4)),
    # NVIDIA Blackwell datasheet, column HGX B200.
    (r"NVIDIA B200", (75.0, 1100.0, 2250.0, 2250.0)),
    # NVIDIA Ada GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 4090", (82.6, 82.6, 165.2, 165.2)),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A.
    (r"NVIDIA GeForce RTX 5090", (104.8, 104.8, 209.5, 209.5)),
)


def peak_tflops(gpu_name: str, precision: str, tf32: bool = False) -> float | None:
    """Peak dense matrix-multiplication rate in TFLOP/s; None for a GPU that is not in the table.

    Args:
        gpu_name: as ``torch.cuda.get_device_name`` gives it.
        precision: ``fp32``, ``bf16`` or ``fp16``, what matrix products compute in.
        tf32: whether fp32 matrix products may run in TF32 on the tensor cores; it changes no other precision.
    """
    column = _COLUMNS.index("tf32" if tf32 and precision == "fp32" else precision)
    return next((peaks[column] for name, peaks in _PEAK_TFLOPS if re.fullmatch(name, gpu_name)), None)


def model_flops_utilization(flops: int, seconds: float, peak_tflops: float | None) -> float | None:
    """MFU: model FLOPs per second as a share (0 to 1) of the peak; None where the peak is unknown.

    Source: PaLM (Chowdhery et al. 2022), appendix B. ``flops`` are ``flops.model_flops`` (nothing recomputed).
    """
    return None if peak_tflops is None else flops / seconds / (peak_tflops * 1e12)


# Memory by name, in bytes: what doctor found on a GPU of that name, else what its datasheet says.
_MEMORY_BYTES = (
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-40GB", 40 * 2**30),
    (r"(NVIDIA )?A100-(SXM4?|PCIE)-80GB|NVIDIA A100 80GB PCIe", 80 * 2**30),
    (r"NVIDIA H100 PCIe|NVIDIA H100 80GB HBM3", 80 * 2**30),
    (r"NVIDIA H100 NVL", 94 * 2**30),
    # docs/results/doctor-h200.md
    (r"NVIDIA H200( NVL)?", int(140.4 * 2**30)),
    (r"NVIDIA B200", 180 * 10**9),
    (r"NVIDIA GeForce RTX 4090", 24 * 2**30),
    (r"NVIDIA GeForce RTX 5090", 32 * 2**30),
)


def memory_bytes(gpu_name: str) -> int | None:
    """The memory of one GPU; None for one that is not in the table, named as for :func:`peak_tflops`."""
    return next((size for name, size in _MEMORY_BYTES if re.fullmatch(name, gpu_name)), None)
