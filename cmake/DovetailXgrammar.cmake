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
file(GLOB XGRAMMAR_SOURCES ${XGRAMMAR_ROOT}/cpp/*.cc ${XGRAMMAR_ROOT}/cpp/support/*.cc
     ${XGRAMMAR_ROOT}/cpp/converter_ext/*.cc)
# Its strings of a bounded length let control characters, surrogates and overlong forms through. JSON does not.
set(XGRAMMAR_CONVERTER ${PROJECT_BINARY_DIR}/third_party/xgrammar_json_schema_converter.cc)
file(READ ${XGRAMMAR_ROOT}/cpp/json_schema_converter.cc XGRAMMAR_TEXT)
string(REPLACE "builder_.AddCharacterClass({{'\"', '\"'}, {'\\\\', '\\\\'}, {'\\r', '\\r'}, {'\\n', '\\n'}}, true)"
       "builder_.AddCharacterClass({{' ', '!'}, {'#', '['}, {']', '~'}, {0x80, 0xd7ff}, {0xe000, 0x10ffff}})"
       XGRAMMAR_MENDED "${XGRAMMAR_TEXT}")
if(XGRAMMAR_MENDED STREQUAL XGRAMMAR_TEXT)
  message(FATAL_ERROR "xgrammar's json_schema_converter.cc is not the one that is mended here")
endif()
file(CONFIGURE OUTPUT ${XGRAMMAR_CONVERTER} CONTENT "${XGRAMMAR_MENDED}" @ONLY)
list(REMOVE_ITEM XGRAMMAR_SOURCES ${XGRAMMAR_ROOT}/cpp/json_schema_converter.cc)
list(APPEND XGRAMMAR_SOURCES ${XGRAMMAR_CONVERTER})
add_library(dovetail_xgrammar STATIC EXCLUDE_FROM_ALL ${XGRAMMAR_SOURCES})
set_target_properties(dovetail_xgrammar PROPERTIES CXX_STANDARD 17 UNITY_BUILD OFF)
target_compile_options(dovetail_xgrammar PRIVATE -w -O2 -include ${PROJECT_SOURCE_DIR}/grammar/xgrammar_tick.h)
target_compile_definitions(dovetail_xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0
                           XGRAMMAR_LOG_CUSTOMIZE=1)
target_include_directories(dovetail_xgrammar SYSTEM PUBLIC ${XGRAMMAR_ROOT}/include
                           ${XGRAMMAR_ROOT}/3rdparty/dlpack/include
                           PRIVATE ${XGRAMMAR_ROOT}/3rdparty/picojson ${XGRAMMAR_ROOT}/cpp)
target_link_libraries(dovetail_xgrammar PRIVATE Threads::Threads)
