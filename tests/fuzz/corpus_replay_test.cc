#include <gtest/gtest.h>

#include <filesystem>

#include "tests/fuzz/targets.h"
#include "tests/support/test_data.h"

// Every build runs every target over its corpus, cut and with bytes changed: what fuzzing once found stays found
// without a fuzzer.

namespace dovetail::fuzz {
namespace {

namespace fs = std::filesystem;

struct Target {
  const char* corpus;
  void (*run)(const uint8_t* data, size_t size);
};

constexpr Target kTargets[] = {
    {"answer", FuzzAnswer},
    {"api_request", FuzzApiRequest},
    {"attention_worker", FuzzAttentionWorker},
    {"chat_template", FuzzChatTemplate},
    {"control", FuzzControl},
    {"frame", FuzzFrame},
    {"gbnf", FuzzGbnf},
    {"lark", FuzzLark},
    {"gguf", FuzzGguf},
    {"http_request", FuzzHttpRequest},
    {"safetensors", FuzzSafetensors},
    {"step_plan", FuzzStepPlan},
    {"tokenize", FuzzTokenize},
    {"tokenizer_json", FuzzTokenizerJson},
    {"wire", FuzzWire},
};

void Feed(const Target& target, const std::string& bytes) {
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());  // no slack behind the end: a sanitizer sees an overrun
  target.run(exact.data(), exact.size());
}

TEST(FuzzCorpus, EveryTargetSurvivesItsSeedsWholeCutAndChanged) {
  for (const Target& target : kTargets) {
    const fs::path folder = dovetail::test::ProjectFile(std::string("tests/fuzz/corpus/") + target.corpus);
    int seeds = 0;
    for (const fs::directory_entry& seed : fs::directory_iterator(folder)) {
      SCOPED_TRACE(seed.path().filename().string());
      const std::string bytes = dovetail::test::ReadFile(seed.path());
      Feed(target, bytes);
      const size_t step = bytes.size() / 2000 + 1;
      for (size_t i = 0; i < bytes.size(); i += step) {
        Feed(target, bytes.substr(0, i));
        std::string changed = bytes;
        changed[i] = static_cast<char>(changed[i] ^ 0xff);
        Feed(target, changed);
      }
      ++seeds;
    }
    EXPECT_GT(seeds, 0) << target.corpus << " has no seeds";
  }
}

}  // namespace
}  // namespace dovetail::fuzz
