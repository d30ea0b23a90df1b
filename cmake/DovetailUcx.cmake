# UCX: Debian's, which has no CUDA, or one that has. GPUs of two processes exchange memory only through the latter,
# whose device API kernels call: PyPI's libucx-cu13 1.22.0 (scripts/fetch_ucx_cuda). A third has CUDA and RDMA, and no
# headers of that API (scripts/fetch_ucx_rdma). One build of UCX for every role of a cluster: two builds do not talk to
# each other.
include(DovetailCuda)
set(DOVETAIL_UCX_ROOT "" CACHE PATH
    "A UCX with CUDA: a folder that scripts/fetch_ucx_cuda or scripts/fetch_ucx_rdma fills. Empty: Debian's UCX")
set(DOVETAIL_HAS_UCX_DEVICE FALSE)
# What a former configuration of this folder found is another one.
if(NOT "${DOVETAIL_UCX_ROOT}" STREQUAL "${DOVETAIL_UCX_OF_ROOT}")
  unset(ucx_DIR CACHE)
endif()
set(DOVETAIL_UCX_OF_ROOT "${DOVETAIL_UCX_ROOT}" CACHE INTERNAL "The root whose UCX is in ucx_DIR")
if(DOVETAIL_UCX_ROOT)
  if(NOT EXISTS ${DOVETAIL_UCX_ROOT}/lib/cmake/ucx/ucx-config.cmake)
    message(FATAL_ERROR "DOVETAIL_UCX_ROOT=${DOVETAIL_UCX_ROOT}: no UCX there (lib/cmake/ucx); scripts/fetch_ucx_cuda "
                        "FOLDER or scripts/fetch_ucx_rdma FOLDER gets one")
  endif()
  find_package(ucx 1.22 REQUIRED PATHS ${DOVETAIL_UCX_ROOT}/lib/cmake/ucx NO_DEFAULT_PATH)
  # libuct lies next to the others, and only they look for it.
  set(CMAKE_BUILD_RPATH ${CMAKE_BUILD_RPATH} ${DOVETAIL_UCX_ROOT}/lib)
  if(DOVETAIL_HAS_CUDA AND EXISTS ${DOVETAIL_UCX_ROOT}/include/ucp/api/device/ucp_device_impl.h)
    set(DOVETAIL_HAS_UCX_DEVICE TRUE)
  endif()
else()
  find_package(ucx 1.13 REQUIRED)
endif()
if(DOVETAIL_HAS_UCX_DEVICE)
  message(STATUS "UCX ${ucx_VERSION} with CUDA: GPUs of two processes exchange layers by themselves")
elseif(DOVETAIL_HAS_CUDA)
  message(STATUS "UCX without CUDA: GPUs of two processes exchange layers through their hosts (DOVETAIL_UCX_ROOT)")
endif()
