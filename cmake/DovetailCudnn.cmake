# cuDNN's headers: cudnn.h of the toolkit or of a package, and cudnn_frontend.h, which nvidia-cudnn-frontend of PyPI
# brings (scripts/fetch_cudnn_frontend FOLDER). Both or none: without them prompts are attended by our own kernel. The
# library itself is opened at run time.
set(DOVETAIL_CUDNN AUTO CACHE STRING "Use cuDNN for prompts: AUTO where its headers are or can be had, or OFF")
set(DOVETAIL_HAS_CUDNN FALSE)
if(DOVETAIL_HAS_CUDA AND NOT DOVETAIL_CUDNN STREQUAL "OFF")
  find_path(DOVETAIL_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/include /usr/local/include)
  set(FETCHED ${PROJECT_BINARY_DIR}/cudnn_frontend)
  find_path(DOVETAIL_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${FETCHED}/include /usr/local/include)
  if(DOVETAIL_CUDNN_INCLUDE AND NOT DOVETAIL_CUDNN_FRONTEND_INCLUDE)
    execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/fetch_cudnn_frontend ${FETCHED} TIMEOUT 60 OUTPUT_QUIET
                    ERROR_QUIET)
    find_path(DOVETAIL_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h HINTS ${FETCHED}/include)
  endif()
  if(DOVETAIL_CUDNN_INCLUDE AND DOVETAIL_CUDNN_FRONTEND_INCLUDE)
    set(DOVETAIL_HAS_CUDNN TRUE)
    message(STATUS "cuDNN: headers in ${DOVETAIL_CUDNN_FRONTEND_INCLUDE}")
  else()
    message(STATUS "cuDNN: no headers, so prompts on GPUs take the kernel for decoding (scripts/fetch_cudnn_frontend)")
  endif()
endif()
