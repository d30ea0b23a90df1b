# The linear-attention state operator, the short convolution before it, and the affine summary of a span.
set(KERNELS_LINEAR_SRCS
    linear_state.cc affine_span.cc short_convolution.cc state_gates.cc moe.cc
    cpu/linear_state_avx2.cc cpu/linear_state_avx512.cc
    reference/linear_state.cc)
dovetail_isa_sources(avx512 cpu/linear_state_avx512.cc)
