# Compiler settings shared by every target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

find_program(DOVETAIL_CCACHE ccache)
if(DOVETAIL_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${DOVETAIL_CCACHE})
endif()

# g++ 12 reports std::variant members as maybe uninitialised; x86-64-v3 (AVX2, FMA, F16C) is the baseline; wider ISAs are compiled per file and chosen at run time.
# Contraction is off: the same source must round the same way wherever it is inlined, or logits would
# differ between placements. Kernels ask for FMA by intrinsic.
add_compile_options(-march=x86-64-v3 -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-unused-parameter
                    -Wno-missing-field-initializers -Wno-maybe-uninitialized)

set(DOVETAIL_SANITIZE "" CACHE STRING "Sanitizers, as for -fsanitize=")
if(DOVETAIL_SANITIZE)
  add_compile_options(-fsanitize=${DOVETAIL_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${DOVETAIL_SANITIZE})
  if(DOVETAIL_SANITIZE MATCHES "thread")
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include ${CMAKE_CURRENT_LIST_DIR}/tsan_of_libraries.h>")
  endif()
endif()
