"""What kernels are called and of which kind they are, with names as nsys and as torch.profiler spell them."""

import ast
from pathlib import Path

import pytest

import cs336sys
from cs336sys.capture.taxonomy import Category, category_of, short_name

# By kind: full names, and short names where they are others.
KERNELS = {
    "matmul": {
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN": None,
        "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_execute_kernel__5x_cublas": None,
        "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80::Params)": (
            "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"
        ),
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams<float>)": "splitKreduce",
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const>>>(x)": "dot",
        "triton_tem_fused_mm_0": None,
    },
    "convolution": {
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int)": "dgrad_engine",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1": None,
        "aten::cudnn_convolution": None,
    },
    "attention/softmax": {
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t>, false>"
        "(pytorch_flash::Flash_fwd_params)": "flash_fwd",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0": None,
        "compute_dot_do_o_specialized": None,
        "triton_tem_fused_flex_attention_0": None,
        # FlashAttention 3, from profiles, cut short.
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd"
        "Sm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, 128, cutlass::bfloat16_t> > > >(T1::Params)": (
            "FlashAttnFwdSm90"
        ),
        # FlashAttention 4, from profiles, cut short at the tensors.
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o11101213": (
            "FlashAttentionForwardSm90"
        ),
        "void at::native::<unnamed>::cunn_SoftMaxForward<(int)4, float, float, float, X>(T4 *, const T2 *, int)": (
            "cunn_SoftMaxForward"
        ),
        "triton_per_fused__softmax_2": None,
        "aten::_scaled_dot_product_flash_attention_for_cpu": None,
    },
    "elementwise": {
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::BinaryFunctor<float, float, float, "
        "at::native::binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)3>>(int, T2, T3)": (
            "vectorized_elementwise Mul<fp32>"
        ),
        "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl<at::native::Binary"
        "Functor<float, float, float, at::native::binary_internal::MulFunctor<float>>>(at::TensorIteratorBase &, const "
        "T1 &)::[lambda(int) (instance 1)]>(int, T3)": "elementwise Mul<fp32>",
        "void at::native::vectorized_elementwise_kernel<(int)4, at::native::addcmul_cuda_kernel(at::TensorIteratorBase "
        "&, const c10::Scalar &)::[lambda() (instance 2)]::operator ()() const::[lambda(float, float, float) (instance "
        "1)], std::array<char *, (unsigned long)4>>(int, T2, T3)": "vectorized_elementwise addcmul<fp32>",
        "triton_poi_fused_add_mul_0": None,
        "aten::exp_": None,
    },
    "reduction": {
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
        "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, "
        "unsigned int, float, 4, 4> >(at::native::ReduceOp<float>)": "reduce sum<fp32>",
        "triton_red_fused_amax_exp_sub_sum_1": None,
        "triton_per_fused__log_softmax_nll_loss_forward_2": None,
        "aten::amax": None,
    },
    "normalization": {
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 128, true, 1, true>(cudnnTensorStruct)": (
            "bn_fw_tr_1C11_kernel_NCHW"
        ),
        "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3": None,
        "kernel_cutlass_kernel_flashinfernormkernelsrmsnormRMSNormKernel_object_at__tensorptrbf16gmem": "RMSNormKernel",
    },
    "pooling": {
        "aten::adaptive_avg_pool2d": None,
    },
    "embedding bag": {
        "void split_embedding_codegen_forward_unweighted_kernel<float, float, float, long, 4>(float const*)": (
            "split_embedding_codegen_forward_unweighted"
        ),
        "aten::_embedding_bag": None,
    },
    "sorting": {
        "void cub::DeviceRadixSortOnesweepKernel<Policy, false, int>(int)": "DeviceRadixSortOnesweepKernel",
    },
    "quantization": {
        "void fbgemm_gpu::_float_to_fused8bitrowwise_cuda_kernel<float>(float const*)": (
            "_float_to_fused8bitrowwise_cuda"
        )
    },
    "layout": {
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(x)": (
            "nchwToNhwcKernel"
        ),
    },
    "optimizer": {
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
        "(at::native::(anonymous namespace)::ADAM_MODE)1, false>, float const*>(int)": (
            "multi_tensor_apply FusedAdamMath<fp32>"
        ),
        "triton_for_fused_0": None,
    },
    "copy": {
        "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
        "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>"
        "(at::TensorIteratorBase&)::{lambda(int)#1}>(int)": "elementwise direct_copy<fp32>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
        "(int)": "vectorized_elementwise Fill<fp32>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<X, unsigned int, 4, 64, 64>(float*)": (
            "CatArrayBatchedCopy"
        ),
        "Memcpy HtoD": None,
        "Memcpy DtoD (Device -> Device)": "Memcpy DtoD",
        "Memset": None,
        "aten::copy_": None,
    },
    "communication": {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        ),
    },
    "dispatch": {"autograd::engine::evaluate_function: AddBackward0": None, "aten::reshape": None},
    "unclassified": {"somebody's kernel": None},
}


def test_every_kind_has_an_example():
    assert tuple(KERNELS) == tuple(Category)


@pytest.mark.parametrize(
    ("category", "kernel", "short"),
    [(category, kernel, short) for category, names in KERNELS.items() for kernel, short in names.items()],
)
def test_kind_and_short_name(category, kernel, short):
    assert category_of(kernel) == category
    assert short_name(kernel) == (short or kernel)


# What the kernels of each module of kernels/ do; those of attention/ stand for the whole folder.
KINDS_OF_OURS = {
    "attention": {"attention/softmax"},
    "adamw": {"optimizer"},
    "linear_cross_entropy.py": {"reduction", "elementwise"},
    "operators.py": {"reduction"},
    "rms_norm.py": {"normalization"},
    "rope.py": {"elementwise"},
    "swiglu.py": {"elementwise"},
    "weighted_sum.py": {"reduction"},
}


def test_every_kernel_of_this_project_is_known():
    """Triton names kernels after their functions, so no two ops may have kernels of one name."""
    found = {}
    for path in (folder := Path(cs336sys.__file__).parent / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                found.setdefault(path.relative_to(folder).parts[0], set()).add(node.name)
    assert {"forward_kernel", "backward_kernel", "prepare_kernel"} <= found["attention"]
    assert {op: {category_of(kernel) for kernel in kernels} for op, kernels in found.items()} == KINDS_OF_OURS
    names = [kernel for kernels in found.values() for kernel in kernels]
    assert len(names) == len(set(names))
