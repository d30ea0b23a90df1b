dovetail_test(model_tokenizer_test
  SRCS
    tokenizer_test_models.cc
    tokenizer_vectors_test.cc
  DEPS dovetail_tokenizer dovetail_model_files)
