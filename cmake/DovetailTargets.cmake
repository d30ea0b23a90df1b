# Several sources of a library are compiled as one: their headers, which take most of the time, are then read once. A
# name in an anonymous namespace is therefore one of the library's. The presets without it (debug, asan-ubsan, tsan)
# compile each source alone, so a source still includes what it needs.
option(DOVETAIL_UNITY "Compile eight sources of a library at a time" OFF)

# dovetail_library(NAME SRCS a.cc ... DEPS lib ... [PRIVATE_DEPS lib ...] [ALONE a.cc ...] [NO_UNITY])
#   A static library dovetail_NAME. Headers are included from the root of the project. ALONE: sources with names of
#   their own that others of the library have too. NO_UNITY: each source is compiled alone.
function(dovetail_library NAME)
  cmake_parse_arguments(ARG "NO_UNITY" "" "SRCS;DEPS;PRIVATE_DEPS;ALONE" ${ARGN})
  if(ARG_SRCS)
    add_library(dovetail_${NAME} STATIC ${ARG_SRCS})
    target_include_directories(dovetail_${NAME} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(dovetail_${NAME} PUBLIC ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
    if(DOVETAIL_UNITY AND NOT ARG_NO_UNITY)
      set_target_properties(dovetail_${NAME} PROPERTIES UNITY_BUILD ON)
      # A source is an included file here, and what it has in an anonymous namespace looks like that of a header; g++ 12
      # sees overlaps in strings that are put together.
      target_compile_options(dovetail_${NAME} PRIVATE -Wno-subobject-linkage -Wno-restrict)
      set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  else()
    add_library(dovetail_${NAME} INTERFACE)
    target_include_directories(dovetail_${NAME} INTERFACE ${PROJECT_SOURCE_DIR})
    target_link_libraries(dovetail_${NAME} INTERFACE ${ARG_DEPS})
  endif()
endfunction()

# dovetail_isa_sources(ISA file.cc ...): compiles these files of the calling folder with the flags of one ISA level.
function(dovetail_isa_sources ISA)
  set(FLAGS "-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq;-mavx512vnni;-mavx512bf16;-mavx512vbmi")
  if(ISA STREQUAL "amx")
    list(APPEND FLAGS -mamx-tile -mamx-int8 -mamx-bf16)
  elseif(NOT ISA STREQUAL "avx512")
    message(FATAL_ERROR "unknown ISA ${ISA}")
  endif()
  set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS "${FLAGS}")
endfunction()

# dovetail_sanitize(TEST ...): under a sanitizer these ctest entries have five times the time. Each of their processes,
#   children too, writes what the sanitizer reports to sanitizer_reports/TEST.PID below the build folder; what lies in
#   libraries is left out. ./check fails when such a file is there. Without a sanitizer: nothing.
function(dovetail_sanitize)
  if(NOT DOVETAIL_SANITIZE)
    return()
  endif()
  foreach(TEST ${ARGN})
    get_test_property(${TEST} TIMEOUT TIMEOUT)
    math(EXPR TIMEOUT "5 * ${TIMEOUT}")
    set(REPORTS "log_path=${PROJECT_BINARY_DIR}/sanitizer_reports/${TEST}")
    if(DOVETAIL_SANITIZE STREQUAL "thread")
      # A thread that ends gives its stack back through a hook of UCX, when the sanitizer has forgotten the thread.
      # What libraries copy is not looked at: gRPC hands buffers from thread to thread by means that are not seen, and
      # a report for every eight bytes of a message, suppressed afterwards, took minutes. Nor is our own memcpy.
      set(SUPPRESSIONS "suppressions=${PROJECT_SOURCE_DIR}/tests/races_of_libraries.txt")
      set(ENVIRONMENT
          "TSAN_OPTIONS=${REPORTS}:halt_on_error=1:ignore_noninstrumented_modules=1:${SUPPRESSIONS}"
          "UCX_MEM_MMAP_HOOK_MODE=none")
    else()
      set(LEAKS "${CMAKE_CURRENT_SOURCE_DIR}/leaks_of_libraries.txt")
      if(NOT EXISTS "${LEAKS}")
        set(LEAKS "${PROJECT_SOURCE_DIR}/tests/leaks_of_libraries.txt")
      endif()
      set(ENVIRONMENT
          "ASAN_OPTIONS=${REPORTS}"
          "UBSAN_OPTIONS=${REPORTS}:print_stacktrace=1"
          "LSAN_OPTIONS=suppressions=${LEAKS}:print_suppressions=0")
    endif()
    set_tests_properties(${TEST} PROPERTIES TIMEOUT ${TIMEOUT} ENVIRONMENT "${ENVIRONMENT}")
  endforeach()
endfunction()

# dovetail_measures_memory(TEST ...): these entries look at how much memory a process has. AddressSanitizer usually
#   keeps 256 MiB of what was freed, to see later uses of it; here it keeps 4 MiB.
function(dovetail_measures_memory)
  foreach(TEST ${ARGN})
    get_test_property(${TEST} ENVIRONMENT ENVIRONMENT)
    if(ENVIRONMENT)
      string(REPLACE "ASAN_OPTIONS=" "ASAN_OPTIONS=quarantine_size_mb=4:" ENVIRONMENT "${ENVIRONMENT}")
      set_tests_properties(${TEST} PROPERTIES ENVIRONMENT "${ENVIRONMENT}")
    endif()
  endforeach()
endfunction()

# dovetail_sanitize_scripts(): dovetail_sanitize() for the tests of this folder that dovetail_test() did not add.
function(dovetail_sanitize_scripts)
  get_property(TESTS DIRECTORY PROPERTY TESTS)
  foreach(TEST ${TESTS})
    get_test_property(${TEST} ENVIRONMENT ENVIRONMENT)
    if(NOT ENVIRONMENT)
      dovetail_sanitize(${TEST})
    endif()
  endforeach()
endfunction()

# dovetail_compile_fast(TARGET ...): where DOVETAIL_UNITY is on, code of tests is compiled without much optimisation,
#   four sources at a time, and with the headers that most tests include compiled once (tests/support). What tests test
#   stays as it is.
function(dovetail_compile_fast)
  if(NOT DOVETAIL_UNITY)
    return()
  endif()
  foreach(TARGET ${ARGN})
    # The headers were compiled with -fPIC, as libraries are; programs are else compiled with -fPIE.
    # -pthread: some targets have it from a library of theirs, and headers compiled without it are of no use to them.
    target_compile_options(${TARGET} PRIVATE -O1 -fPIC -pthread -fpch-preprocess)
    target_precompile_headers(${TARGET} REUSE_FROM dovetail_test_headers)
    get_target_property(SOURCES ${TARGET} SOURCES)
    list(LENGTH SOURCES COUNT)
    if(COUNT GREATER 1)
      set_target_properties(${TARGET} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
    endif()
  endforeach()
endfunction()

# The tests that ./check --long adds, which are not in `all`.
add_custom_target(long_tests)

# dovetail_test(NAME SRCS a_test.cc ... DEPS lib ... [ALONE a_test.cc ...] [LONG] [THREADS] [COMPUTES]
#               [TIMEOUT seconds])
#   One GoogleTest binary and one ctest entry. LONG tests run only under ./check --long, which also runs THREADS tests
#   under ThreadSanitizer. COMPUTES: the test computes and waits for no clock or other process, so ./check runs as many
#   of these at a time as there are cores. ALONE: sources with names of their own that others of the test have too.
function(dovetail_test NAME)
  cmake_parse_arguments(ARG "LONG;THREADS;COMPUTES" "TIMEOUT" "SRCS;DEPS;ALONE" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${NAME} ${ARG_SRCS})
  target_link_libraries(${NAME} PRIVATE ${ARG_DEPS} dovetail_test_support GTest::gmock GTest::gtest)
  dovetail_compile_fast(${NAME})
  set_source_files_properties(${ARG_ALONE} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  # Before ctest ends it, the test says where it hangs (tests/support/hang_report.h).
  set(LIMIT ${ARG_TIMEOUT})
  if(DOVETAIL_SANITIZE)
    math(EXPR LIMIT "5 * ${ARG_TIMEOUT}")
  endif()
  math(EXPR LIMIT "${LIMIT} - 20")
  add_test(NAME ${NAME} COMMAND ${NAME} --time_limit=${LIMIT})
  set_tests_properties(${NAME} PROPERTIES TIMEOUT ${ARG_TIMEOUT})
  dovetail_sanitize(${NAME})
  set(LABELS "")
  if(ARG_LONG)
    list(APPEND LABELS long)
    set_target_properties(${NAME} PROPERTIES EXCLUDE_FROM_ALL TRUE)
    add_dependencies(long_tests ${NAME})
  endif()
  if(ARG_THREADS)
    list(APPEND LABELS threads)
  endif()
  if(ARG_COMPUTES)
    list(APPEND LABELS computes)
  endif()
  set_tests_properties(${NAME} PROPERTIES LABELS "${LABELS}")
endfunction()

# dovetail_bench(NAME SRCS a_bench.cc ... DEPS lib ...): a Google Benchmark binary in bench/.
function(dovetail_bench NAME)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${NAME} ${ARG_SRCS})
  target_link_libraries(${NAME} PRIVATE ${ARG_DEPS} benchmark::benchmark)
endfunction()
