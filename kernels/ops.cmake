# Attention, its merge, KV append, and the row ops.
set(KERNELS_OPS_SRCS
    activation.cc convert.cc kv_append.cc kv_block.cc merge_partials.cc op_context.cc paged_attention.cc rms_norm.cc rope.cc
    cpu/ops_avx2.cc cpu/ops_avx512.cc
    reference/paged_attention.cc)
dovetail_isa_sources(avx512 cpu/ops_avx512.cc)
