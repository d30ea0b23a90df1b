dovetail_library(model_files
  SRCS checkpoint.cc config.cc dense_work.cc describe.cc dummy_checkpoint.cc pooling.cc rope.cc tensor_source.cc
       families/checkpoint_tensors.cc families/checkpoint_tensors_experts.cc families/checkpoint_tensors_hybrid.cc
       families/checkpoint_tensors_states.cc families/config_gguf.cc families/config_gguf_hybrid.cc
       families/config_json.cc families/config_json_hybrid.cc families/config_json_mamba.cc
       families/config_json_rope.cc families/config_json_spelling.cc families/gguf_names.cc families/gguf_places.cc
       formats/dequantize.cc formats/file_errors.cc formats/ggml_types.cc formats/gguf.cc formats/gguf_parse.cc
       formats/json_file.cc formats/mapped_file.cc formats/safetensors.cc formats/safetensors_parse.cc
  DEPS dovetail_base dovetail_kernels nlohmann_json::nlohmann_json absl::flat_hash_map absl::flat_hash_set
       absl::str_format absl::strings
  ALONE families/config_json.cc families/config_json_hybrid.cc families/gguf_places.cc)
