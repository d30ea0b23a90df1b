set(KERNELS_CORE_SRCS aligned_buffer.cc gemm.cc kernel_table.cc packed_weights.cc pages_ahead.cc quant_format.cc
    thread_pool.cc
    cpu/cpu_device.cc cpu/isa.cc cpu/gemm_convert_avx2.cc cpu/gemm_float_avx2.cc cpu/gemm_quantized_avx2.cc
    cpu/gemm_convert_avx512.cc cpu/gemm_float_avx512.cc cpu/gemm_quantized_avx512.cc
    cpu/gemm_float_amx.cc cpu/gemm_quantized_amx.cc)
dovetail_isa_sources(avx512 cpu/gemm_convert_avx512.cc cpu/gemm_float_avx512.cc cpu/gemm_quantized_avx512.cc)
dovetail_isa_sources(amx cpu/gemm_float_amx.cc cpu/gemm_quantized_amx.cc)

# Oracles are for tests only: no binary that serves links them.
dovetail_library(kernels_reference_gemm SRCS reference/gemm.cc DEPS dovetail_kernels)
