"""Kinds of kernels by name: the one table of patterns. Standard library only."""

import functools
import re
from enum import StrEnum
from typing import Self


class Category(StrEnum):
    """Kinds of kernels, in the order of tables and pictures, with their colours."""

    color: str

    def __new__(cls, name: str, color: str) -> Self:
        kind = str.__new__(cls, name)
        kind._value_, kind.color = name, color
        return kind

    # What matrix products take stands out from what moves memory.
    MATMUL = "matmul", "#1f4e96"
    CONVOLUTION = "convolution", "#1f9e89"
    ATTENTION_SOFTMAX = "attention/softmax", "#c23b22"
    ELEMENTWISE = "elementwise", "#f2c14e"
    REDUCTION = "reduction", "#9c8a3c"
    NORMALIZATION = "normalization", "#8172b3"
    POOLING = "pooling", "#5e8c31"
    # Of embedding bags and jagged tensors, as recommendation models have them.
    EMBEDDING_BAG = "embedding bag", "#b5651d"
    SORTING = "sorting", "#a3467f"
    QUANTIZATION = "quantization", "#c8a2c8"
    # Transpositions, from NCHW to NHWC and the like.
    LAYOUT = "layout", "#b0a990"
    OPTIMIZER = "optimizer", "#00a35c"
    COPY = "copy", "#5a3d28"
    COMMUNICATION = "communication", "#da8bc3"
    # Views, allocation and autograd's bookkeeping: only where CPU operations stand in for kernels.
    DISPATCH = "dispatch", "#64b5cd"
    UNCLASSIFIED = "unclassified", "#8c8c8c"


# The first pattern found anywhere in the full name decides, whatever its case; so what is more special stands first:
# flash attention is made of cutlass, and a fused normalization is a reduction too.
_PATTERNS: tuple[tuple[Category, *tuple[str, ...]], ...] = (
    (
        Category.COMMUNICATION,
        r"nccl|rccl|mscclKernel|nvshmem|multimem|_shot_all_reduce|c10d::|record_param_comms|^gloo:",
    ),
    (
        Category.ATTENTION_SOFTMAX,
        # torch's fused attention: FlashAttention, memory-efficient, cuDNN; FlexAttention of inductor.
        r"flash_|fmha|mem_?eff_?attention|sdpa|dot_do_o|flex_attention|aten::_(scaled_dot_product|efficient_att)",
        # AOTriton's on AMD GPUs, SageAttention; those of inference engines over pages of keys and values.
        r"^_?(attn|sage)_(fwd|bwd)|^bwd_(kernel|preprocess)|(paged|unified|decode)_attention",
        # FlashAttention 3, all of it in the namespace flash; 4, which CuTe DSL calls by module and class run together.
        r"\bflash::|flash_?att(n|ention)",
        # This project's kernels, by the names of their functions.
        r"^(forward|(reducer_|wide_)?backward|prepare|convert_(grad_query|register_order)|sum_pieces|combine)_kernel$",
    ),
    (Category.ELEMENTWISE, r"^(_?rope(_qkv)?|_swiglu_(forward|backward)|cross_entropy_scale)_kernel$"),
    (Category.REDUCTION, r"^(_weighted_sum_(forward|backward)|_partial_sums|_embedding_sum)_kernel$"),
    (Category.SORTING, r"^_embedding_order_kernel$"),
    (Category.REDUCTION, r"log_?softmax|nll_loss|cross_entropy"),
    (Category.ATTENTION_SOFTMAX, r"softmax"),
    # FBGEMM's are no products, though its name ends like one.
    (
        Category.EMBEDDING_BAG,
        r"embedding_?bag|split_embedding|embedding_codegen|bounds_check_indices|jagged|pooled_emb",
    ),
    # cuDNN's and MIOpen's; a product of matrices may be what they compute by.
    (
        Category.CONVOLUTION,
        r"fprop|wgrad|dgrad|winograd|scudnn|convol|im2col|col2im|im2d2col|fft[12]d|cask_cudnn|gcnAsmConv|naive_conv|implicit_gemm"
        r"|igemm_(fwd|bwd|wrw)|conv_depthwise|\bconv\d?d_|_conv\d?d(?=[_<(]|$)",
    ),
    (Category.QUANTIZATION, r"quantiz|_quant_|FP8_?quant|to_fp8|FloatToH?FP8|fused_?8bit|int8_quant"),
    # Products of experts: Triton's and TensorRT's, named after the formats of inputs and output.
    (Category.MATMUL, r"matmul_ogs|^bmm_\w*(E\dm\d|fp\d|float16)"),
    # Which expert gets which token.
    (Category.SORTING, r"::routing|_routing_(compute|memset)|_sum_bitmatrix"),
    (
        Category.MATMUL,
        r"^Cijk_|rocblas|hipblas",  # AMD's are named after Tensile's indices.
        # cuBLAS on Hopper and later is nvjet; before: gemm, gemv, dot, cutlass, xmma; a split-K product ends in a sum.
        # CuTe DSL calls all kernels kernel_cutlass_..., normalizations too.
        r"nvjet|gemm|gemv|(?<!kernel_)cutlass|xmma|cublas|splitk|magma_|\bdot_kernel|triton_(tem|mm)_",
        r"^aten::(mm|bmm|addmm|baddbmm|linear|matmul|_scaled_mm|_addmm_activation)$|mkl(dnn)?_linear",
    ),
    # Optimizers over lists of tensors: torch's foreach and fused ones, inductor's foreach.
    (Category.OPTIMIZER, r"multi_tensor|foreach|triton_for_|adam|_fused_sgd"),
    # A reduction that takes a reciprocal root is RMSNorm or layer norm.
    (
        Category.NORMALIZATION,
        r"(layer|rms|group|batch|instance)_?norm|\bbn_(fw|bw)|RowwiseMoments|GammaBeta|triton_(red|per)_\w*rsqrt"
        r"|Compute(Internal|Backward)?(Fused|Gradients)",
    ),
    (Category.POOLING, r"pool"),
    (Category.SORTING, r"radix|sort|top_?k|bitonic|::unique|UniqueByKey|DeviceCompactInit"),
    # The gradient of an embedding.
    (Category.ELEMENTWISE, r"compute_grad_weight|krn_partial|compute_num_of_partial_segments"),
    (Category.LAYOUT, r"nchwToNhwc|nhwcToNchw|nchwAddPadding|(?<!aten::)(transpose|permute)|tensorTransformGeneric"),
    (
        Category.COPY,
        r"^Mem(cpy|set)|copy_(async_)?kernel|store_kvcache|CatArrayBatchedCopy|FillFunctor|fill_kernel|^aten::(copy_|fill_|zero_|cat|clone)$",
    ),
    (
        Category.REDUCTION,
        r"reduce|triton_(red|per)_|DeviceScan|scan_|cumsum|argmax",
        r"^aten::(sum|mean|amax|amin|max|min|norm|linalg_vector_norm|_log_softmax\w*|logsumexp|all|any)$",
    ),
    (
        Category.ELEMENTWISE,
        r"elementwise|act_and_mul|SubTensorOp|scalePackedTensor|triton_poi_|index|gather|scatter|embedding|arange|tri[lu]_|distribution|dropout",
        r"^aten::(add|sub|rsub|mul|div|neg|exp|log|pow|square|sqrt|rsqrt|reciprocal|sigmoid|silu|tanh)_?$",
        r"^aten::(where|lerp|addcmul|addcdiv|clamp|masked_fill|ge|gt|le|lt|eq|ne|bitwise_\w+|\w+_backward)_?$",
    ),
    (
        Category.DISPATCH,
        r"^autograd::|^torch::autograd|Backward\d*$|^_CrossEntropy|^CompiledFunction|^Torch-Compiled|^detach$",
        r"^aten::(\w*view\w*|\w*reshape\w*|as_strided\w*|expand\w*|transpose|permute|t|numpy_T|mT|\w*flatten)$",
        r"^aten::((un)?squeeze|slice|select|narrow|unbind|stack|detach|resize_|resolve_\w+|result_type)$",
        r"^aten::(empty\w*|new_\w+|zeros\w*|ones\w*|scalar_tensor|to|_to_copy|promote_types|item|_local_scalar\w*)$",
    ),
)
_COMPILED = tuple((category, re.compile("|".join(patterns), re.IGNORECASE)) for category, *patterns in _PATTERNS)


@functools.cache
def category_of(kernel: str) -> Category:
    """Return the kind of a kernel, or of a CPU operation, by its full name.

    A name says nothing about purpose: an eager softmax or RMSNorm consists of elementwise kernels and reductions.
    """
    return next((category for category, pattern in _COMPILED if pattern.search(kernel)), Category.UNCLASSIFIED)


_DTYPES = {"float": "fp32", "double": "fp64", "BFloat16": "bf16", "Half": "fp16", "long": "int64", "int": "int32"}
_DTYPE = re.compile(rf"\b({'|'.join([*_DTYPES, 'bool'])})\b")
_ANONYMOUS = re.compile(r"(\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
# How FlashAttention 3 keeps code for one architecture out of builds for others.
_ARCHITECTURE_WRAPPER = re.compile(r"^\s*(\w+::)*enable_sm\w+<")
# CuTe DSL's names: kernel_cutlass_kernel_, the module without its dots, the class, its address, the arguments.
_CUTE_CLASS = re.compile(r"kernel_cutlass_kernel_[a-z0-9_]*?([A-Z]\w*?)_object_at_")
# What torch's generic kernels were made for: exp_kernel_cuda, addcmul_cuda_kernel, lerp_scalar_kernel(, MulFunctor,
# CUDAFunctorOnSelf_add, sum_functor, MeanOps, GeluCUDAKernelImpl, launch_clamp_scalar(.
_OPERATION = re.compile(
    r"\b(?P<before>\w+?)(_kernel_cuda|_cuda_kernel|_kernel_impl|CUDAKernelImpl|_functor|Ops|_kernel(?=\()"
    r"|Functor((?P<scalar>On(Self|Other))?_(?P<after>\w+))?)\b|\blaunch_(?P<launched>\w+)(?=\()"
)
_BRACKET = re.compile(r"[<(]")  # Begins a kernel's arguments, of its template or of the function.
# What scatter and gather do with each element.
_SCATTERED = re.compile(r"\b(TensorAssign|Reduce(Add|Multiply|Maximum|Minimum|Mean))\b")
# Functors around the one that says what is computed, unless they stand alone. AUnary and BUnary have a scalar operand.
_SCALAR_WRAPPERS = ("BUnary", "AUnary")
_WRAPPERS = ("Binary", "Unary", "Compare", *_SCALAR_WRAPPERS)


@functools.cache
def short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces and arguments: ``vectorized_elementwise Mul<fp32>``.

    Names of nsys and of torch.profiler, which spell templates differently, become the same; so may different kernels'.
    """
    cute_class = _CUTE_CLASS.search(kernel)
    if cute_class:
        return cute_class[1]
    text = _ANONYMOUS.sub("", kernel.removeprefix("void "))
    qualified, *arguments_of_kernel = _BRACKET.split(text, maxsplit=1)
    function = qualified.rpartition("::")[2].strip()
    if not arguments_of_kernel or not function:
        return text
    (arguments,) = arguments_of_kernel
    if function in ("Kernel", "Kernel2", "device_kernel"):
        # cutlass has one kernel, and its first argument says what it does.
        arguments = _ARCHITECTURE_WRAPPER.sub("", arguments)
        return _BRACKET.split(arguments, maxsplit=1)[0].rpartition("::")[2].rstrip(">")
    function = function.removesuffix("_kernel")
    # gpu_kernel_impl is around operations on tensors of several dtypes, whatever they compute.
    matches = [match for match in _OPERATION.finditer(arguments) if match["before"] != "gpu"]
    if not matches:
        scattered = _SCATTERED.search(arguments)
        return f"{function} {scattered[0]}" if scattered else function
    # The outermost that is no wrapper says what is computed; its name stands before or after a word such as Functor.
    match = next((match for match in matches if match["before"] not in _WRAPPERS), matches[0])
    operation = match["after"] or match["launched"] or match["before"]
    if match["scalar"] or matches[0]["before"] in _SCALAR_WRAPPERS:
        operation += "_scalar"
    dtype = _DTYPE.search(arguments, matches[0].end())  # The first after an operation's name.
    return f"{function} {operation}" + (f"<{_DTYPES.get(dtype[1], dtype[1])}>" if dtype else "")
