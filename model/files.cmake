dovetail_library(model_files
  SRCS checkpoint.cc checkpoint_tensors.cc checkpoint_tensors_experts.cc checkpoint_tensors_hybrid.cc
       checkpoint_tensors_states.cc config.cc config_gguf.cc config_gguf_hybrid.cc config_json.cc config_json_hybrid.cc
       config_json_mamba.cc config_json_rope.cc config_json_spelling.cc dequantize.cc describe.cc dummy_checkpoint.cc
       file_errors.cc ggml_types.cc gguf.cc gguf_names.cc gguf_parse.cc gguf_places.cc json_file.cc mapped_file.cc
       rope.cc safetensors.cc safetensors_parse.cc tensor_source.cc
  DEPS dovetail_base dovetail_kernels nlohmann_json::nlohmann_json absl::flat_hash_map absl::flat_hash_set
       absl::str_format absl::strings)
