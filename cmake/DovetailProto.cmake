# Protocol buffers and gRPC. Protobuf before gRPC: Debian's gRPC config asks for its targets.
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)

# dovetail_proto_library(NAME file.proto ...): generated messages and services as a static library. Generated headers are included by their
# place in the project: "proto/control/dovetail_control.grpc.pb.h".
function(dovetail_proto_library NAME)
  set(SRCS)
  foreach(PROTO ${ARGN})
    get_filename_component(STEM ${PROTO} NAME_WE)
    file(RELATIVE_PATH FOLDER ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
    set(OUT ${PROJECT_BINARY_DIR}/${FOLDER}/${STEM})
    add_custom_command(
      OUTPUT ${OUT}.pb.cc ${OUT}.pb.h ${OUT}.grpc.pb.cc ${OUT}.grpc.pb.h
      COMMAND protobuf::protoc --proto_path=${PROJECT_SOURCE_DIR} --cpp_out=${PROJECT_BINARY_DIR}
              --grpc_out=${PROJECT_BINARY_DIR} --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin>
              ${FOLDER}/${PROTO}
      WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      DEPENDS ${PROTO}
      VERBATIM)
    list(APPEND SRCS ${OUT}.pb.cc ${OUT}.grpc.pb.cc)
  endforeach()
  add_library(dovetail_${NAME} STATIC ${SRCS})
  target_include_directories(dovetail_${NAME} SYSTEM PUBLIC ${PROJECT_BINARY_DIR})
  target_link_libraries(dovetail_${NAME} PUBLIC protobuf::libprotobuf gRPC::grpc++)
  target_compile_options(dovetail_${NAME} PRIVATE -w)
endfunction()
