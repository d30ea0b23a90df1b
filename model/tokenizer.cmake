dovetail_library(tokenizer
  SRCS
    tokenizer/bpe.cc
    tokenizer/byte_level.cc
    tokenizer/detokenizer.cc
    tokenizer/normalize.cc
    tokenizer/pre_tokenizer.cc
    tokenizer/special_tokens.cc
    tokenizer/stop_strings.cc
    tokenizer/tokenizer.cc
    tokenizer/tokenizer_build.cc
    tokenizer/tokenizer_gguf.cc
    tokenizer/tokenizer_json.cc
    tokenizer/tokenizer_json_parse.cc
    tokenizer/tokenizer_json_steps.cc
    tokenizer/utf8.cc
    tokenizer/vocabulary.cc
  DEPS dovetail_base nlohmann_json::nlohmann_json absl::flat_hash_map absl::strings
  PRIVATE_DEPS PkgConfig::PCRE2 PkgConfig::UTF8PROC)
