# CUDA is optional: DOVETAIL_CUDA=AUTO builds libdovetail_cuda.so where nvcc is found, ON insists, OFF does not look.
# Everything else opens that library at run time, so no other target links or includes anything of CUDA.
set(DOVETAIL_CUDA AUTO CACHE STRING "Build the CUDA library: AUTO, ON or OFF")
set_property(CACHE DOVETAIL_CUDA PROPERTY STRINGS AUTO ON OFF)
# As nvcc names them: 80, 90a; with -virtual behind it, PTX that a newer driver compiles.
set(DOVETAIL_CUDA_ARCHITECTURES "80-virtual;90a" CACHE STRING
    "Compute capabilities to build for, e.g. 80;90a;80-virtual")

set(DOVETAIL_HAS_CUDA FALSE)
if(NOT DOVETAIL_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit 12.4 QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE AND TARGET CUDA::cudart_static)
    set(DOVETAIL_HAS_CUDA TRUE)
    message(STATUS "CUDA ${CUDAToolkit_VERSION}: building for ${DOVETAIL_CUDA_ARCHITECTURES}")
  elseif(DOVETAIL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "DOVETAIL_CUDA=ON, but no CUDA toolkit (nvcc 12.4 or newer with libcudart_static.a) was "
                        "found; put its bin folder on PATH, or configure with -DCUDAToolkit_ROOT=FOLDER")
  else()
    message(STATUS "CUDA: no nvcc found, building without it")
  endif()
endif()

# dovetail_cuda_objects(OUT file.cu ...): compiles for all architectures; OUT gets the object files. Other people's
# headers are found in DOVETAIL_CUDA_INCLUDES.
function(dovetail_cuda_objects OUT)
  set(FLAGS -std=c++20 -O3 --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden)
  foreach(ARCHITECTURE ${DOVETAIL_CUDA_ARCHITECTURES})
    if(ARCHITECTURE MATCHES "^([0-9]+a?)-virtual$")
      list(APPEND FLAGS "-gencode=arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
    elseif(ARCHITECTURE MATCHES "^[0-9]+a?$")
      list(APPEND FLAGS "-gencode=arch=compute_${ARCHITECTURE},code=sm_${ARCHITECTURE}")
    else()
      message(FATAL_ERROR "DOVETAIL_CUDA_ARCHITECTURES: '${ARCHITECTURE}' is none of 80, 90a, 80-virtual and the like")
    endif()
  endforeach()
  foreach(FOLDER ${DOVETAIL_CUDA_INCLUDES})
    list(APPEND FLAGS -isystem ${FOLDER})
  endforeach()
  set(OBJECTS)
  foreach(SOURCE ${ARGN})
    get_filename_component(STEM ${SOURCE} NAME_WE)
    set(OBJECT ${CMAKE_CURRENT_BINARY_DIR}/${STEM}.cu.o)  # no two sources have one name
    add_custom_command(
      OUTPUT ${OBJECT}
      COMMAND ${DOVETAIL_CCACHE} ${CUDAToolkit_NVCC_EXECUTABLE} ${FLAGS} -I${PROJECT_SOURCE_DIR} -MD -MF ${OBJECT}.d -c
              ${CMAKE_CURRENT_SOURCE_DIR}/${SOURCE} -o ${OBJECT}
      DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${SOURCE}
      DEPFILE ${OBJECT}.d
      COMMENT "Building CUDA object ${SOURCE}"
      VERBATIM)
    list(APPEND OBJECTS ${OBJECT})
  endforeach()
  set(${OUT} ${OBJECTS} PARENT_SCOPE)
endfunction()
