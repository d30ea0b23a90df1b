# xgrammar 0.2.8: grammars over a tokenizer's tokens, without its Python binding (scripts/fetch_xgrammar). A static
# library of a C++17 part; only grammar/ includes its headers.
set(DOVETAIL_XGRAMMAR_ROOT "" CACHE PATH "The folder xgrammar-0.2.8 of its source archive. Empty: it is fetched")
set(XGRAMMAR_ROOT ${DOVETAIL_XGRAMMAR_ROOT})
if(NOT XGRAMMAR_ROOT)
  set(XGRAMMAR_ROOT ${PROJECT_BINARY_DIR}/third_party/xgrammar-0.2.8)
  if(NOT EXISTS ${XGRAMMAR_ROOT}/include/xgrammar/compiler.h)
    execute_process(COMMAND ${PROJECT_SOURCE_DIR}/scripts/fetch_xgrammar ${PROJECT_BINARY_DIR}/third_party TIMEOUT 400
                    RESULT_VARIABLE FETCHED ERROR_VARIABLE WHY)
    if(NOT FETCHED EQUAL 0)
      message(FATAL_ERROR "xgrammar's sources could not be fetched: ${WHY}; put the folder of its source archive into "
                          "DOVETAIL_XGRAMMAR_ROOT")
    endif()
  endif()
endif()
# A copy of its sources is mended, once for each folder of sources and each content of the file that says how.
include(DovetailXgrammarMends)
file(READ ${CMAKE_CURRENT_LIST_DIR}/DovetailXgrammarMends.cmake XGRAMMAR_MENDS)
string(MD5 XGRAMMAR_MENDS "${XGRAMMAR_ROOT} ${XGRAMMAR_MENDS}")
string(SUBSTRING ${XGRAMMAR_MENDS} 0 8 XGRAMMAR_MENDS)
set(XGRAMMAR_CPP ${PROJECT_BINARY_DIR}/third_party/xgrammar_${XGRAMMAR_MENDS}/cpp)
if(NOT EXISTS ${XGRAMMAR_CPP})
  file(REMOVE_RECURSE ${PROJECT_BINARY_DIR}/third_party/xgrammar_being_mended)
  file(COPY ${XGRAMMAR_ROOT}/cpp DESTINATION ${PROJECT_BINARY_DIR}/third_party/xgrammar_being_mended)
  dovetail_mend_xgrammar_sources(${PROJECT_BINARY_DIR}/third_party/xgrammar_being_mended/cpp)
  file(RENAME ${PROJECT_BINARY_DIR}/third_party/xgrammar_being_mended
       ${PROJECT_BINARY_DIR}/third_party/xgrammar_${XGRAMMAR_MENDS})
endif()
file(GLOB XGRAMMAR_SOURCES ${XGRAMMAR_CPP}/*.cc ${XGRAMMAR_CPP}/support/*.cc ${XGRAMMAR_CPP}/converter_ext/*.cc)
add_library(dovetail_xgrammar STATIC EXCLUDE_FROM_ALL ${XGRAMMAR_SOURCES})
set_target_properties(dovetail_xgrammar PROPERTIES CXX_STANDARD 17 UNITY_BUILD OFF)
target_compile_options(dovetail_xgrammar PRIVATE -w -O2 -include ${PROJECT_SOURCE_DIR}/grammar/xgrammar_tick.h)
target_compile_definitions(dovetail_xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0
                           XGRAMMAR_LOG_CUSTOMIZE=1)
target_include_directories(dovetail_xgrammar SYSTEM PUBLIC ${XGRAMMAR_ROOT}/include
                           ${XGRAMMAR_ROOT}/3rdparty/dlpack/include
                           PRIVATE ${XGRAMMAR_ROOT}/3rdparty/picojson ${XGRAMMAR_CPP} ${PROJECT_SOURCE_DIR})
target_link_libraries(dovetail_xgrammar PRIVATE Threads::Threads)
