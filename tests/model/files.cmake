dovetail_test(model_dequantize_test SRCS dequantize_test.cc DEPS dovetail_model_files)
dovetail_test(model_gguf_test SRCS gguf_malformed_test.cc gguf_test.cc DEPS dovetail_model_files)
dovetail_test(model_checkpoint_test SRCS checkpoint_fp8_test.cc checkpoint_hybrid_test.cc checkpoint_test.cc
              DEPS dovetail_model_files)
dovetail_test(model_pooling_test SRCS pooling_test.cc DEPS dovetail_model_files)
dovetail_test(model_rope_test SRCS rope_test.cc DEPS dovetail_model_files)
dovetail_test(model_safetensors_test SRCS safetensors_test.cc DEPS dovetail_model_files)
dovetail_test(model_config_test
  SRCS config_families_test.cc config_gguf_hybrid_test.cc config_gguf_test.cc config_hybrid_test.cc config_test.cc
  ALONE config_hybrid_test.cc config_test.cc DEPS dovetail_model_files)
dovetail_test(model_describe_test SRCS describe_test.cc DEPS dovetail_model_files)
