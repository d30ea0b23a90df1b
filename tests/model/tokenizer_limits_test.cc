#include <gtest/gtest.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <string>

#include "model/tokenizer/tokenizer.h"
#include "tests/model/tokenizer_test_models.h"
#include "tests/support/test_data.h"

// A megabyte of one character must be no heavier than a megabyte of prose: no deep recursion, no quadratic time, no
// heap of match states. Each text is encoded on a thread with a stack of 256 KiB.

namespace dovetail::model::test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(DOVETAIL_TSAN)
constexpr bool kInstrumented = true;
#else
constexpr bool kInstrumented = false;
#endif

constexpr size_t kMiB = size_t{1} << 20;

struct Unit {
  const char* name;
  std::string text;
};

const std::vector<Unit>& Units() {
  static const auto* const units = new std::vector<Unit>{{"A", "A"},
                                                         {"space", " "},
                                                         {"CJK", "漢"},
                                                         {"mark", "\u0301"},
                                                         {"digit", "7"},
                                                         {"emoji", "🚀"},
                                                         {"newline", "\n"},
                                                         {"lower", "a"},
                                                         {"apostrophe", "'"},
                                                         {"space and newline", " \n"},
                                                         {"control", "\x01"},
                                                         {"marks of two classes", "\u0301\u0323"},
                                                         {"unclosed special", "<|bos|"},
                                                         {"letter and mark", "a\u0323\u0301"},
                                                         {"upper after CJK", "漢AAAAAAA"}};
  return *units;
}

std::string Repeat(const std::string& unit, size_t bytes) {
  std::string text;
  while (text.size() + unit.size() <= bytes) text += unit;
  return text;
}

// Runs `work` on a thread of 256 KiB and returns the processor seconds it took.
double SecondsOnSmallThread(const std::function<void()>& work) {
  struct Call {
    const std::function<void()>* work;
    double seconds = 0;
  } call{&work};
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  // Sanitizers need room for their own frames.
  pthread_attr_setstacksize(&attributes, kInstrumented ? 4 * kMiB : 256 * 1024);
  pthread_t thread;
  const int error = pthread_create(
      &thread, &attributes,
      [](void* argument) -> void* {
        auto* const self = static_cast<Call*>(argument);
        const auto now = [] {
          timespec time;
          clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
          return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
        };
        const double start = now();
        (*self->work)();
        self->seconds = now() - start;
        return nullptr;
      },
      &call);
  EXPECT_EQ(error, 0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  return call.seconds;
}

size_t StatusKib(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == field + ":") {
      size_t kib = 0;
      status >> kib;
      return kib;
    }
  }
  return 0;
}

void ResetPeak() { std::ofstream("/proc/self/clear_refs") << "5"; }

void ExpectHarmless(const Tokenizer& tokenizer, const std::string& what) {
  double slowest = 0;
  size_t largest_kib = 0;
  for (const Unit& unit : Units()) {
    SCOPED_TRACE(what + ": " + unit.name);
    const std::string whole = Repeat(unit.text, kMiB);
    const auto encode = [&](const std::string& text) {
      return SecondsOnSmallThread([&] {
        const auto ids = tokenizer.Encode(text, {.parse_special = true});
        EXPECT_TRUE(ids.ok()) << ids.status();
        EXPECT_GT(ids.ok() ? ids->size() : 0, 1u);
      });
    };
    ResetPeak();
    const size_t before = StatusKib("VmRSS");
    const double seconds = encode(whole);
    if (kInstrumented) continue;
    const size_t peak = StatusKib("VmHWM");
    EXPECT_LT(peak > before ? peak - before : 0, 128u * 1024);
    slowest = std::max(slowest, seconds);
    largest_kib = std::max(largest_kib, peak > before ? peak - before : 0);
    // Linear work takes 0.1 s of processor time, quadratic work at one nanosecond a pair takes minutes: the
    // limit tells them apart on any machine.
    EXPECT_LT(seconds, 10.0);
  }
  std::printf("%s: at most %.2f s and %zu MiB for 1 MiB\n", what.c_str(), slowest, largest_kib / 1024);
}

TEST(TokenizerLimits, AMegabyteOfOneCharacterIsHarmlessForEveryPreTokenizer) {
  for (const PreTokenizer pre :
       {PreTokenizer::kGpt2, PreTokenizer::kLlama3, PreTokenizer::kQwen2, PreTokenizer::kQwen35, PreTokenizer::kGpt4o,
        PreTokenizer::kTekken, PreTokenizer::kDeepSeek3, PreTokenizer::kSmolLm}) {
    TokenizerData data = TalesData();
    data.pre_tokenizer = pre;
    data.normalize_nfc = pre == PreTokenizer::kQwen2;
    ExpectHarmless(*Make(std::move(data)), std::string(Name(pre)));
  }
}

TEST(TokenizerLimits, AMegabyteOfOneCharacterIsHarmlessForSpm) { ExpectHarmless(*Make(TinySpmData()), "tiny SPM"); }

TEST(TokenizerLimits, AMegabyteOfOneCharacterIsHarmlessForLlama2) {
  DOVETAIL_DATA_OR_SKIP(const auto gguf, "tokenizers/vectors/ggml-vocab-llama-spm.gguf.gz");
  DOVETAIL_DATA_OR_SKIP(const auto json, "tokenizers/llama2/tokenizer.json.gz");
  ExpectHarmless(*FromGgufFile(gguf), "llama-spm");
  ExpectHarmless(*FromJsonFile(json, false), "llama2");
}

TEST(TokenizerLimits, AMegabyteOfOneCharacterIsHarmlessForLlama3) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/llama3_1/tokenizer.json.gz");
  ExpectHarmless(*FromJsonFile(path, false), "llama3");
}

TEST(TokenizerLimits, AMegabyteOfOneCharacterIsHarmlessForQwen3) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "tokenizers/qwen3/tokenizer.json.gz");
  ExpectHarmless(*FromJsonFile(path, false), "qwen3");
}

}  // namespace
}  // namespace dovetail::model::test
