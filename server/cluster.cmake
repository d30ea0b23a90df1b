# The disaggregated system in one process, behind Engine.
dovetail_library(embedded_cluster SRCS embedded_cluster.cc kv_room.cc model_digest.cc
  DEPS dovetail_attention_worker dovetail_compute_worker dovetail_scheduler dovetail_model dovetail_transport)

# A server whose engine is another process's scheduler.
dovetail_library(remote_engine SRCS remote_engine.cc remote_model.cc
  DEPS dovetail_compute_worker dovetail_control dovetail_embedded_cluster dovetail_model)

# The generation API that routers speak, beside HTTP.
dovetail_library(grpc_server
  SRCS grpc/credentials.cc grpc/generate_call.cc grpc/generate_request.cc grpc/generate_response.cc
       grpc/generation_service.cc
  DEPS dovetail_control dovetail_http dovetail_openai dovetail_scheduler_core dovetail_tokenizer dovetail_vllm_proto
       dovetail_work gRPC::grpc++_reflection)

# Where a model's layers run.
dovetail_library(device_choice SRCS cli/device_choice.cc DEPS dovetail_compute_worker dovetail_kernels dovetail_model)

dovetail_library(cli
  SRCS
    cli/api_keys.cc
    cli/api_server.cc
    cli/attention_worker_command.cc
    cli/child_processes.cc
    cli/cluster_commands.cc
    cli/cluster_flags.cc
    cli/compute_worker_command.cc
    cli/cors_flags.cc
    cli/limit_flags.cc
    cli/scheduler_command.cc
    cli/server_command.cc
    cli/status_command.cc
    cli/tls_flags.cc
    cli/up_command.cc
    cli/bench_command.cc
    cli/command_line.cc
    cli/engine_flags.cc
    cli/generation.cc
    cli/devices_command.cc
    cli/exchange_choice.cc
    cli/inspect_command.cc
    cli/logits_command.cc
    cli/model_text.cc
    cli/role.cc
    cli/run_command.cc
    cli/serve_command.cc
    cli/stop_signal.cc
  DEPS dovetail_attention_worker_main dovetail_bench_engine dovetail_chat_template dovetail_cluster_scheduler
       dovetail_compute_worker_main dovetail_device_choice dovetail_embedded_cluster dovetail_grpc_server
       dovetail_http dovetail_openai dovetail_remote_engine dovetail_tokenizer dovetail_ucx_connector
       CLI11::CLI11)
add_executable(dovetail cli/main.cc)
target_link_libraries(dovetail PRIVATE dovetail_cli)
set_target_properties(dovetail PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
# DT_RPATH, which the libraries that it brings along obey, too (scripts/bundle).
target_link_options(dovetail PRIVATE -Wl,--disable-new-dtags)
set(places "$ORIGIN/../lib")
if(DOVETAIL_UCX_ROOT)
  list(APPEND places ${DOVETAIL_UCX_ROOT}/lib)
endif()
set_target_properties(dovetail PROPERTIES INSTALL_RPATH "${places}")
install(TARGETS dovetail RUNTIME DESTINATION bin)
