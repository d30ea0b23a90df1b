dovetail_test(kernels_core_test
  SRCS cpu_device_test.cc gemm_test.cc gemm_matrices.cc packed_weights_test.cc pages_ahead_test.cc thread_pool_test.cc
  DEPS dovetail_kernels dovetail_kernels_reference_gemm THREADS)
