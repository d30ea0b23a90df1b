#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "loadgen/prompt_writer.h"
#include "loadgen/request.h"

// What is asked for: the requests of a load, made before it starts. Names and defaults are those of `vllm bench serve`.
// Threads: reentrant; calls with one writer must not overlap.

namespace dovetail::loadgen {

inline constexpr int64_t kMaxRequests = 1'000'000;
inline constexpr int64_t kMaxTokensOfRequest = int64_t{1} << 24;
inline constexpr int64_t kMaxPromptBytes = int64_t{8} << 30;  // of all prompts: they lie in memory

enum class TooLong : uint8_t { kError, kSkip, kClip };  // a request that the model's positions do not hold

struct DatasetOptions {
  std::string name = "random";  // random, sharegpt, sonnet, custom, prefix_repetition, timed_trace
  std::string path;
  int64_t num_prompts = 1000;
  uint64_t seed = 0;
  bool no_oversample = false;    // a file of fewer requests gives fewer, else they are drawn again
  bool disable_shuffle = false;  // of files
  std::string request_id_prefix;

  int64_t random_input_len = 1024, random_output_len = 128, random_prefix_len = 0;
  double random_input_range = 0, random_output_range = 0;  // lengths lie in [len (1 - r), len (1 + r)]

  int64_t sharegpt_output_len = 0;  // 0: that of the answer in the file
  int64_t custom_output_len = 256;  // -1: that of the field output_tokens
  int64_t sonnet_input_len = 550, sonnet_output_len = 150, sonnet_prefix_len = 200;
  int64_t prefix_repetition_prefix_len = 256, prefix_repetition_suffix_len = 256;
  int64_t prefix_repetition_num_prefixes = 10, prefix_repetition_output_len = 128;

  int64_t trace_chunk_tokens = 0;  // of one of hash_ids; 0: a power of two that fits all rows, 16 without hash_ids
  double trace_sec_multiplier = 1;
  double time_scale = 1;    // times of a trace are multiplied by this: 2 replays at half the speed
  double length_scale = 1;  // lengths of a trace are multiplied by this
  std::string trace_timestamp = "timestamp", trace_input_length = "input_length";
  std::string trace_output_length = "output_length", trace_hash_ids = "hash_ids";

  int64_t max_model_len = 0;  // what the server says; 0: it does not
  TooLong too_long = TooLong::kError;

  // kInvalidArgument names the flag: lengths outside their range, NaN, more requests than memory holds.
  absl::Status Validate() const;
};

struct Dataset {
  std::vector<PlannedRequest> requests;
  bool timed = false;              // PlannedRequest::at_s counts
  std::vector<std::string> notes;  // for people: what was inferred, skipped or shortened
};

// Makes the requests. Errors name file, line and field. The same for one seed, one vocabulary and one file. Blocks on
// files and on the writer's counter.
absl::StatusOr<Dataset> MakeDataset(const DatasetOptions& options, const PromptWriter& writer);

// What a request is called in errors about its length.
struct LengthPlace {
  std::string where;         // "trace.jsonl: line 7"
  std::string input_field;   // "input_length"
  std::string output_field;  // "output_length"
};
enum class Fits : uint8_t { kYes, kSkip };
// Holds the lengths of a request against the model's and shortens them as `too_long` says: first the prompt, then the
// answer. kInvalidArgument names place and fields.
absl::StatusOr<Fits> FitLengths(const DatasetOptions& options, const LengthPlace& place, int64_t& input_len,
                                int64_t& output_len);
// The same for a text that cannot be shortened by tokens: a prompt that is too long is skipped where lengths are
// clipped.
absl::StatusOr<Fits> FitText(const DatasetOptions& options, const LengthPlace& place, int64_t input_len,
                             int64_t& output_len);

// Draws requests again until there are --num-prompts, unless --no-oversample.
void Oversample(const DatasetOptions& options, Random& random, Dataset& dataset);

// One kind of dataset each.
absl::StatusOr<Dataset> MakeRandom(const DatasetOptions& options, const PromptWriter& writer);
absl::StatusOr<Dataset> MakePrefixRepetition(const DatasetOptions& options, const PromptWriter& writer);
absl::StatusOr<Dataset> MakeSonnet(const DatasetOptions& options, const PromptWriter& writer);
absl::StatusOr<Dataset> ReadShareGpt(const DatasetOptions& options, const PromptWriter& writer);
absl::StatusOr<Dataset> ReadCustom(const DatasetOptions& options, const PromptWriter& writer);
absl::StatusOr<Dataset> ReadTrace(const DatasetOptions& options, const PromptWriter& writer);

}  // namespace dovetail::loadgen
