dovetail_test(model_tokenizer_test
  SRCS
    tokenizer_bound_test.cc
    tokenizer_detokenizer_test.cc
    tokenizer_pre_tokenizer_test.cc
    tokenizer_readers_test.cc
    tokenizer_special_test.cc
    tokenizer_stop_strings_test.cc
    tokenizer_test_models.cc
    tokenizer_vectors_test.cc
  ALONE tokenizer_test_models.cc tokenizer_vectors_test.cc
  DEPS dovetail_tokenizer dovetail_model_files)
# A binary of its own: it measures the memory of the process.
dovetail_test(model_tokenizer_limits_test
  SRCS tokenizer_limits_test.cc tokenizer_test_models.cc
  DEPS dovetail_tokenizer dovetail_model_files COMPUTES)
