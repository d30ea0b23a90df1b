dovetail_test(paged_attention_test SRCS paged_attention_test.cc DEPS dovetail_kernels)
dovetail_test(merge_partials_test SRCS merge_partials_test.cc DEPS dovetail_kernels)
dovetail_test(row_ops_test SRCS row_ops_test.cc DEPS dovetail_kernels)
dovetail_test(sampling_test SRCS sampling_test.cc DEPS dovetail_kernels)
