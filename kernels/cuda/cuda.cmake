# KERNELS_CUDA_SRCS: the host's side of the GPU, in every build.
# libdovetail_cuda.so: what it opens, where nvcc is found.
set(KERNELS_CUDA_SRCS
    cuda/attention/attention_plan.cc cuda/attention/cuda_attention.cc cuda/attention/merge_partials.cc
    cuda/attention/prefill_plan.cc
    cuda/exchange/cuda_exchange.cc
    cuda/experts/expert_ops.cc cuda/experts/expert_product.cc
    cuda/products/cuda_gemm.cc cuda/products/cuda_product.cc cuda/products/cuda_weights.cc cuda/products/quant_ops.cc
    cuda/products/quant_pack.cc
    cuda/rows/row_ops.cc
    cuda/runtime/cuda_device.cc cuda/runtime/cuda_library.cc cuda/runtime/enqueue.cc cuda/runtime/memory_pool.cc
    cuda/runtime/staged_upload.cc cuda/runtime/step_work.cc
    cuda/sampling/cuda_sampler.cc cuda/sampling/sample.cc
    cuda/state/cuda_state.cc cuda/state/layer_ops.cc cuda/state/state_layout.cc cuda/state/state_pack.cc)

include(DovetailCuda)
if(DOVETAIL_HAS_CUDA)
  dovetail_cuda_objects(KERNELS_CUDA_OBJECTS
      cuda/attention/attention_bf16.cu cuda/attention/attention_e4m3.cu cuda/attention/attention_f16.cu
      cuda/attention/merge.cu cuda/attention/pack_heads.cu cuda/attention/prefill.cu cuda/attention/prefill_join.cu
      cuda/exchange/copy_runs.cu cuda/exchange/exchange.cu cuda/exchange/exchange_joins.cu
      cuda/experts/expert_codes_bf16.cu cuda/experts/expert_codes_f16.cu
      cuda/experts/expert_ops.cu cuda/experts/gated_add.cu cuda/experts/grouped_product.cu
      cuda/experts/pair_products.cu cuda/experts/route.cu cuda/experts/route_cluster.cu
      cuda/products/gated_product.cu cuda/products/in_order_product.cu
      cuda/products/quant_gemm_bf16.cu cuda/products/quant_gemm_f16.cu
      cuda/products/quant_unpack.cu cuda/products/skinny_gemm.cu
      cuda/rows/elementwise.cu cuda/rows/gated_activation.cu cuda/rows/join_keys.cu cuda/rows/kv_append.cu
      cuda/rows/mlp_activation.cu cuda/rows/rms_norm.cu cuda/rows/rope_table.cu
      cuda/runtime/has_code.cu
      cuda/sampling/sampling.cu
      cuda/state/layer_ops.cu cuda/state/state_append.cu cuda/state/state_chunk_prepare.cu
      cuda/state/state_chunk_prepare_vector.cu cuda/state/state_chunks.cu cuda/state/state_chunks_direct.cu
      cuda/state/state_decode.cu cuda/state/state_pack.cu)
  set(PEER_POINTER cuda/exchange/no_peer_pointer.cc)
  if(DOVETAIL_HAS_UCX_DEVICE)  # kernels that call UCX's device API
    set(DOVETAIL_CUDA_INCLUDES ${DOVETAIL_UCX_ROOT}/include)
    dovetail_cuda_objects(PEER_POINTER cuda/exchange/peer_pointer.cu)
    list(APPEND KERNELS_CUDA_OBJECTS ${PEER_POINTER})
  endif()
  add_library(dovetail_cuda MODULE cuda/backend.cc cuda/products/blas_lt.cc cuda/products/gemm_lt.cc
              cuda/products/in_order_check.cc cuda/products/product_table.cc
              cuda/runtime/open_library.cc cuda/runtime/runtime.cc
              ${PEER_POINTER} ${KERNELS_CUDA_OBJECTS})
  set_source_files_properties(${KERNELS_CUDA_OBJECTS} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  target_include_directories(dovetail_cuda PRIVATE ${PROJECT_SOURCE_DIR})
  target_include_directories(dovetail_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_options(dovetail_cuda PRIVATE -fvisibility=hidden)
  target_link_libraries(dovetail_cuda PRIVATE CUDA::cudart_static)
  target_link_options(dovetail_cuda PRIVATE -Wl,--exclude-libs,ALL)
  if(NOT DOVETAIL_SANITIZE)  # whose functions come with the program
    target_link_options(dovetail_cuda PRIVATE -Wl,--no-undefined)
  endif()
  set_target_properties(dovetail_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
  install(TARGETS dovetail_cuda LIBRARY DESTINATION lib)
endif()
