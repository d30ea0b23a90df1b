# Attention, its merge, KV append, and the row ops.
set(KERNELS_OPS_SRCS
    activation.cc convert.cc kv_append.cc kv_block.cc kv_eight_bits.cc
    merge_partials.cc op_context.cc paged_attention.cc
    paged_attention_checks.cc rms_norm.cc rope.cc
    sampling.cc cpu/ops_avx2.cc cpu/ops_avx512.cc
    reference/activation.cc reference/paged_attention.cc reference/rms_norm.cc reference/rope.cc reference/sampling.cc)
dovetail_isa_sources(avx512 cpu/ops_avx512.cc)
