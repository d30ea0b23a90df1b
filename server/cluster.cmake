# The disaggregated system in one process, behind Engine.
dovetail_library(embedded_cluster SRCS embedded_cluster.cc model_digest.cc
  DEPS dovetail_attention_worker dovetail_compute_worker dovetail_scheduler dovetail_model dovetail_transport)

dovetail_library(cli
  SRCS
    cli/bench_command.cc
    cli/command_line.cc
    cli/engine_flags.cc
    cli/generation.cc
    cli/inspect_command.cc
    cli/logits_command.cc
    cli/model_text.cc
    cli/run_command.cc
    cli/serve_command.cc
  DEPS dovetail_bench_engine dovetail_chat_template dovetail_embedded_cluster dovetail_http dovetail_openai dovetail_tokenizer
       CLI11::CLI11)
add_executable(dovetail cli/main.cc)
target_link_libraries(dovetail PRIVATE dovetail_cli)
set_target_properties(dovetail PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
