# KERNELS_CUDA_SRCS: the host's side of the GPU, in every build.
# libdovetail_cuda.so: what it opens, where nvcc is found.
set(KERNELS_CUDA_SRCS cuda/attention_plan.cc cuda/cuda_attention.cc cuda/cuda_device.cc cuda/cuda_exchange.cc
    cuda/cuda_hybrid_ops.cc cuda/cuda_library.cc cuda/cuda_ops.cc cuda/cuda_product.cc cuda/cuda_prompts.cc
    cuda/cuda_sampler.cc cuda/cuda_state.cc cuda/cuda_weights.cc cuda/memory_pool.cc cuda/prompt_planner.cc
    cuda/prompt_sizes.cc cuda/quant_ops.cc cuda/quant_pack.cc cuda/staged_upload.cc cuda/state_layout.cc
    cuda/step_work.cc)

include(DovetailCuda)
if(DOVETAIL_HAS_CUDA)
  dovetail_cuda_objects(KERNELS_CUDA_OBJECTS cuda/attention_bf16.cu cuda/attention_f16.cu cuda/attention_e4m3.cu
                        cuda/exchange.cu cuda/few_rows.cu cuda/gated_product.cu cuda/has_code.cu cuda/hybrid_ops.cu
                        cuda/kv_append.cu cuda/merge.cu cuda/moe_ops.cu
                        cuda/quant_gemm_bf16.cu cuda/quant_gemm_f16.cu cuda/quant_unpack.cu
                        cuda/row_ops.cu cuda/sampling.cu cuda/state_append.cu cuda/state_chunk_prepare.cu
                        cuda/state_chunk_prepare_vector.cu cuda/state_chunks.cu cuda/state_chunks_direct.cu
                        cuda/state_decode.cu)
  set(PEER_POINTER cuda/no_peer_pointer.cc)
  if(DOVETAIL_HAS_UCX_DEVICE)  # kernels that call UCX's device API
    set(DOVETAIL_CUDA_INCLUDES ${DOVETAIL_UCX_ROOT}/include)
    dovetail_cuda_objects(PEER_POINTER cuda/peer_pointer.cu)
    list(APPEND KERNELS_CUDA_OBJECTS ${PEER_POINTER})
  endif()
  include(DovetailCudnn)
  set(KERNELS_DNN_SRC cuda/prompt_dnn_absent.cc)
  if(DOVETAIL_HAS_CUDNN)
    set(KERNELS_DNN_SRC cuda/prompt_dnn.cc)
  endif()
  add_library(dovetail_cuda MODULE cuda/backend.cc cuda/gemm_lt.cc cuda/open_library.cc cuda/product_table.cc
              cuda/runtime.cc
              ${KERNELS_DNN_SRC} ${PEER_POINTER} ${KERNELS_CUDA_OBJECTS})
  if(DOVETAIL_HAS_CUDNN)
    target_include_directories(dovetail_cuda SYSTEM PRIVATE ${DOVETAIL_CUDNN_FRONTEND_INCLUDE}
                                                            ${DOVETAIL_CUDNN_INCLUDE})
  endif()
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
