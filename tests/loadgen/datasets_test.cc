#include "loadgen/datasets/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "absl/strings/str_split.h"
#include "loadgen/datasets/line_reader.h"
#include "loadgen/datasets/trace_rows.h"
#include "tests/support/test_data.h"

namespace dovetail::loadgen {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// A token for each word, and one before the text.
class WordCounter final : public TokenCounter {
 public:
  absl::StatusOr<int64_t> Count(std::string_view text) override {
    return 1 + static_cast<int64_t>(std::vector<std::string>(
                                        absl::StrSplit(std::string(text), absl::ByAnyChar(" \n"), absl::SkipEmpty()))
                                        .size());
  }
};

class Datasets : public ::testing::Test {
 protected:
  WordCounter counter;
  PromptWriter writer{*VocabularyOf(counter, "words"), &counter};
  const std::filesystem::path folder = ::dovetail::test::TempFolder();

  std::string File(const std::string& name, const std::string& text) {
    const auto path = folder / name;
    std::ofstream(path) << text;
    return path.string();
  }
  static std::string ErrorOf(const absl::StatusOr<Dataset>& dataset) { return std::string(dataset.status().message()); }
  DatasetOptions Trace(const std::string& text) {
    DatasetOptions options;
    options.name = "timed_trace";
    options.path = File("trace.jsonl", text);
    return options;
  }
};

TEST_F(Datasets, RandomPromptsHaveTheLengthsAskedFor) {
  DatasetOptions options;
  options.num_prompts = 50;
  options.random_prefix_len = 7;
  options.random_input_len = 101;
  options.random_input_range = 0.5;
  options.random_output_range = 0.25;
  options.request_id_prefix = "x-";
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_THAT(dataset->requests, SizeIs(50));
  EXPECT_EQ(dataset->requests[3].id, "x-3");
  int64_t shortest = 1000, longest = 0;
  const std::string prefix = dataset->requests[0].prompt.substr(0, 20);
  for (const PlannedRequest& request : dataset->requests) {
    EXPECT_EQ(*counter.Count(request.prompt), request.input_len);
    EXPECT_EQ(request.prompt.substr(0, 20), prefix);
    shortest = std::min(shortest, request.input_len);
    longest = std::max(longest, request.input_len);
    EXPECT_GE(request.output_len, 96);
    EXPECT_LE(request.output_len, 160);
  }
  // 7 + 1 + [50, 150]: the special token belongs to the input.
  EXPECT_GE(shortest, 58);
  EXPECT_LE(longest, 158);
  EXPECT_GT(longest, shortest + 30);
  EXPECT_NE(dataset->requests[0].prompt, dataset->requests[1].prompt);
  EXPECT_EQ(MakeDataset(options, writer)->requests[9].prompt, dataset->requests[9].prompt) << "the same for one seed";
}

TEST_F(Datasets, PrefixRepetitionSharesEachPrefix) {
  DatasetOptions options;
  options.name = "prefix_repetition";
  options.num_prompts = 9;
  options.prefix_repetition_num_prefixes = 2;
  options.prefix_repetition_prefix_len = 30;
  options.prefix_repetition_suffix_len = 10;
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_THAT(dataset->requests, SizeIs(8));
  EXPECT_THAT(dataset->notes, ElementsAre(HasSubstr("1 of 9 are left out")));
  std::map<std::string, int> prefixes;
  for (const PlannedRequest& request : dataset->requests) {
    EXPECT_EQ(*counter.Count(request.prompt), 40);
    ++prefixes[request.prompt.substr(0, 60)];
  }
  EXPECT_EQ(prefixes.size(), 2u);
}

TEST_F(Datasets, SonnetsShareTheirFirstLines) {
  DatasetOptions options;
  options.name = "sonnet";
  options.num_prompts = 4;
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  for (const PlannedRequest& request : dataset->requests) {
    EXPECT_NEAR(static_cast<double>(request.input_len), 550, 12) << "a line more or less";
    EXPECT_EQ(request.output_len, 150);
    EXPECT_EQ(request.prompt.substr(0, 600), dataset->requests[0].prompt.substr(0, 600));
  }
  EXPECT_NE(dataset->requests[0].prompt, dataset->requests[1].prompt);
  options.path = File("poem.txt", "one two three four\nfive six seven eight\n");
  options.sonnet_input_len = 40;
  options.sonnet_prefix_len = 20;
  const auto from_file = MakeDataset(options, writer);
  ASSERT_TRUE(from_file.ok()) << from_file.status();
  EXPECT_THAT(from_file->requests[0].prompt, HasSubstr("Pick as many lines as you can"));
  EXPECT_THAT(from_file->requests[0].prompt, HasSubstr("five six seven eight\n"));
}

TEST_F(Datasets, ShareGptTakesTheFirstTwoTurns) {
  DatasetOptions options;
  options.name = "sharegpt";
  options.num_prompts = 3;
  options.disable_shuffle = true;
  options.path = File("sharegpt.json", R"([
    {"id": "a", "conversations": [{"from": "human", "value": "one two three four"},
                                  {"from": "gpt", "value": "a b c d e"}, {"from": "human", "value": "x"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
    {"id": "c", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "too short"}]},
    {"id": "d", "conversations": [{"from": "human", "value": "five six seven eight"},
                                  {"from": "gpt", "value": "f g h i"}]}])");
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_THAT(dataset->requests, SizeIs(3));
  EXPECT_EQ(dataset->requests[0].prompt, "one two three four");
  EXPECT_EQ(dataset->requests[0].input_len, 5);
  EXPECT_EQ(dataset->requests[0].output_len, 6);
  EXPECT_EQ(dataset->requests[1].prompt, "five six seven eight");
  EXPECT_THAT(dataset->notes, ElementsAre(HasSubstr("2 usable requests; drawn again up to 3")));
  options.no_oversample = true;
  EXPECT_THAT(MakeDataset(options, writer)->requests, SizeIs(2));
  options.path = File("bad.json", R"([{"conversations": [{"value": "a"}, {"value": "b"}]}, {"conv)");
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), AllOf(HasSubstr("bad.json"), HasSubstr("entry 2")));
  options.path = File("none.json", "[]");
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("none of its 0 entries"));
}

TEST_F(Datasets, CustomLinesNameTheirLineAndField) {
  DatasetOptions options;
  options.name = "custom";
  options.num_prompts = 2;
  options.custom_output_len = -1;
  options.disable_shuffle = true;
  options.path =
      File("c.jsonl", "{\"prompt\": \"a b\", \"output_tokens\": 3}\n\n{\"prompt\": \"c\", \"output_tokens\": 4}\n");
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  EXPECT_EQ(dataset->requests[0].prompt, "a b");
  EXPECT_EQ(dataset->requests[1].output_len, 4);
  options.path = File("c.jsonl", "{\"prompt\": \"a\", \"output_tokens\": 1}\n{\"prompt\": 7}\n");
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("c.jsonl: line 2: prompt: has to be a text"));
  options.path = File("c.jsonl", "{\"prompt\": \"a\"}\n");
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("c.jsonl: line 1: output_tokens: "));
  options.path = File("c.jsonl", "{\"prompt\": \"a\"\n");
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("c.jsonl: line 1: is not JSON"));
  options.path = (folder / "nowhere").string();
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("there is no such file"));
}

TEST_F(Datasets, TracesKeepTimesLengthsAndSharedPrefixes) {
  DatasetOptions options = Trace(R"({"timestamp": 3000, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 4]})"
                                 "\n"
                                 R"({"timestamp": 1000, "input_length": 33, "output_length": 5, "hash_ids": [1, 2, 3]})"
                                 "\n");
  options.trace_sec_multiplier = 0.001;
  options.time_scale = 0.5;
  const auto dataset = MakeDataset(options, writer);
  ASSERT_TRUE(dataset.ok()) << dataset.status();
  ASSERT_THAT(dataset->requests, SizeIs(2));
  EXPECT_TRUE(dataset->timed);
  EXPECT_THAT(dataset->notes, ElementsAre(HasSubstr("is 16 tokens")));
  const PlannedRequest& first = dataset->requests[0];
  const PlannedRequest& second = dataset->requests[1];
  EXPECT_DOUBLE_EQ(first.at_s, 0) << "the trace begins at its first request";
  EXPECT_DOUBLE_EQ(second.at_s, 1);
  EXPECT_EQ(*counter.Count(first.prompt), 33);
  EXPECT_EQ(*counter.Count(second.prompt), 40);
  EXPECT_EQ(first.output_len, 5);
  const std::vector<std::string> a = absl::StrSplit(first.prompt, ' '), b = absl::StrSplit(second.prompt, ' ');
  const auto [in_a, in_b] = std::mismatch(a.begin(), a.end(), b.begin());
  EXPECT_EQ(in_a - a.begin(), 32) << "two blocks of 16 words are shared, and no more";
}

TEST_F(Datasets, TracesAreScaledAndHeldAgainstTheModel) {
  DatasetOptions options = Trace(R"({"timestamp": 0, "input_length": 100, "output_length": 20})"
                                 "\n"
                                 R"({"timestamp": 1, "input_length": 1000, "output_length": 20})"
                                 "\n");
  options.max_model_len = 600;
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)),
              AllOf(HasSubstr("trace.jsonl: line 2: input_length 1000 and output_length 20 are more than the 600"),
                    HasSubstr("--length-scale")));
  options.too_long = TooLong::kSkip;
  EXPECT_THAT(MakeDataset(options, writer)->requests, SizeIs(1));
  options.too_long = TooLong::kClip;
  const auto clipped = MakeDataset(options, writer);
  EXPECT_EQ(clipped->requests[1].input_len, 580);
  EXPECT_THAT(clipped->notes, ElementsAre(HasSubstr("1 requests are too long for the model: shortened")));
  options.too_long = TooLong::kError;
  options.length_scale = 0.5;
  const auto scaled = MakeDataset(options, writer);
  ASSERT_TRUE(scaled.ok()) << scaled.status();
  EXPECT_EQ(scaled->requests[1].input_len, 500);
  EXPECT_EQ(scaled->requests[1].output_len, 10);
}

TEST_F(Datasets, BadTracesAreRefusedByLineAndField) {
  const std::string good = R"({"timestamp": 0, "input_length": 5, "output_length": 3})"
                           "\n";
  const auto error = [&](const std::string& line) { return ErrorOf(MakeDataset(Trace(good + line), writer)); };
  EXPECT_THAT(error(R"({"timestamp": -1, "input_length": 5, "output_length": 3})"),
              HasSubstr("line 2: timestamp: -1 is not a time of at least 0"));
  EXPECT_THAT(error(R"({"timestamp": NaN, "input_length": 5, "output_length": 3})"),
              AllOf(HasSubstr("line 2: is not JSON: byte 15"), HasSubstr("timestamp")));
  EXPECT_THAT(error(R"({"timestamp": "soon", "input_length": 5, "output_length": 3})"),
              HasSubstr("line 2: timestamp: \"soon\""));
  EXPECT_THAT(error(R"({"timestamp": 1e400, "input_length": 5, "output_length": 3})"),
              HasSubstr("line 2: number overflow parsing '1e400'"));
  EXPECT_THAT(error(R"({"timestamp": 1, "input_length": -5, "output_length": 3})"),
              HasSubstr("line 2: input_length: -5 is not a whole number of tokens"));
  EXPECT_THAT(error(R"({"timestamp": 1, "input_length": 5.5, "output_length": 3})"), HasSubstr("line 2: input_length"));
  EXPECT_THAT(error(R"({"timestamp": 1, "input_length": 5, "output_length": 0})"),
              HasSubstr("line 2: output_length: 0"));
  EXPECT_THAT(error(R"({"timestamp": 1, "input_length": 100000000, "output_length": 1})"),
              HasSubstr("line 2: input_length: 100000000"));
  EXPECT_THAT(error(R"({"time": 1, "input_length": 5, "output_length": 1})"),
              AllOf(HasSubstr("line 2: has no field timestamp; it has"), HasSubstr("--timed-trace-label-timestamp")));
  EXPECT_THAT(error(R"({"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["a"]})"),
              HasSubstr("line 2: hash_ids"));
  EXPECT_THAT(error(R"({"timestamp": 100000000, "input_length": 5, "output_length": 1})"),
              HasSubstr("--timed-trace-sec-multiplier 0.001"));
  DatasetOptions wrong_blocks =
      Trace(R"({"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1, 2]})");
  wrong_blocks.trace_chunk_tokens = 16;
  EXPECT_THAT(ErrorOf(MakeDataset(wrong_blocks, writer)),
              HasSubstr("line 1: hash_ids: 2 ids for 40 tokens do not fit blocks of --timed-trace-chunk-hash-size 16"));
  EXPECT_THAT(ErrorOf(MakeDataset(Trace("\n"), writer)), HasSubstr("has no request"));
}

TEST_F(Datasets, AHundredMillionRequestsAreRefusedBeforeAnythingIsMade) {
  DatasetOptions options;
  options.num_prompts = 100'000'000;
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("--num-prompts: 100000000 is outside 1..1000000"));
  options.num_prompts = 1'000'000;
  options.random_input_len = 100'000;
  EXPECT_THAT(ErrorOf(MakeDataset(options, writer)), HasSubstr("--num-prompts: 1000000 prompts would take 600 GB"));
}

TEST_F(Datasets, FlagsOutsideTheirRangeAreNamed) {
  const auto error = [&](const std::function<void(DatasetOptions&)>& change) {
    DatasetOptions options;
    change(options);
    return std::string(options.Validate().message());
  };
  EXPECT_EQ(error([](DatasetOptions&) {}), "");
  EXPECT_THAT(error([](DatasetOptions& o) { o.random_input_range = 1; }), HasSubstr("--random-range-ratio: 1"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.random_output_range = NAN; }), HasSubstr("--random-range-ratio"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.random_input_len = 0; }), HasSubstr("--random-input-len"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.time_scale = NAN; }), HasSubstr("--time-scale"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.length_scale = 0; }), HasSubstr("--length-scale"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.name = "timed_trace"; }), HasSubstr("--dataset-path"));
  EXPECT_THAT(error([](DatasetOptions& o) { o.path = "x"; }), HasSubstr("reads no file"));
}

TEST_F(Datasets, ReadsAzuresTableCompressed) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "traces/AzureLLMInferenceTrace_conv_2023.csv.gz");
  DatasetOptions options;
  options.name = "timed_trace";
  options.path = path.string();
  options.num_prompts = 100'000;
  const auto rows = ReadTraceRows(options);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_THAT(*rows, SizeIs(19366));  // the numbers are those of the traces' own README
  EXPECT_NEAR(rows->back().at_s, 3501.7, 0.05);
  double input = 0, output = 0;
  for (const TraceRow& row : *rows)
    input += static_cast<double>(row.input_len), output += static_cast<double>(row.output_len);
  EXPECT_NEAR(input / 19366, 1154.7, 0.05);
  EXPECT_NEAR(output / 19366, 211.1, 0.05);
}

TEST_F(Datasets, ReadsMooncakesBlocksCompressed) {
  DOVETAIL_DATA_OR_SKIP(const auto path, "traces/mooncake_fast25_conversation_trace.jsonl.gz");
  DatasetOptions options;
  options.name = "timed_trace";
  options.path = path.string();
  options.num_prompts = 100'000;
  options.trace_sec_multiplier = 0.001;
  const auto rows = ReadTraceRows(options);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_THAT(*rows, SizeIs(12031));
  EXPECT_NEAR(rows->back().at_s, 3537, 1);
  EXPECT_EQ(*ChunkTokens(options, *rows), 512);
}

TEST_F(Datasets, LinesAreReadHoweverTheyEnd) {
  const auto reader = LineReader::Open(File("lines", "a\r\n\nlast"));
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ(**(*reader)->Next(), "a");
  EXPECT_EQ(**(*reader)->Next(), "");
  EXPECT_EQ(**(*reader)->Next(), "last");
  EXPECT_FALSE((*reader)->Next()->has_value());
  EXPECT_EQ((*reader)->line(), 3);
  const auto damaged = LineReader::Open(File("damaged.gz", "\x1f\x8b\x08 not gzip at all"));
  ASSERT_TRUE(damaged.ok());
  EXPECT_THAT(std::string((*damaged)->Next().status().message()), HasSubstr("gzip"));
}

}  // namespace
}  // namespace dovetail::loadgen
