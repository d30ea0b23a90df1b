#include "server/cli/bench_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/test_data.h"

namespace dovetail::cli {
namespace {

using ::testing::HasSubstr;

// What the command line gives; "" if it parses.
std::string Parse(std::vector<std::string> arguments, BenchFlags& flags) {
  CLI::App app;
  AddBenchFlags(app, flags);
  std::reverse(arguments.begin(), arguments.end());
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "";
}

TEST(BenchCommand, ReadsItsFlags) {
  BenchFlags flags;
  ASSERT_EQ(Parse({"model.gguf", "--batch", "1,16,64", "--prompt-tokens", "256", "--output-tokens", "0", "--repeat",
                   "2", "--json"},
                  flags),
            "");
  EXPECT_EQ(flags.engine.model, "model.gguf");
  EXPECT_EQ(flags.batch, (std::vector<int>{1, 16, 64}));
  EXPECT_EQ(flags.prompt_tokens, 256);
  EXPECT_EQ(flags.output_tokens, 0);
  EXPECT_EQ(flags.repeat, 2);
  EXPECT_TRUE(flags.json);
}

TEST(BenchCommand, RefusesWhatItCannotMeasureByTheFlagsName) {
  BenchFlags flags;
  EXPECT_THAT(Parse({"model.gguf", "--repeat", "0"}, flags), HasSubstr("--repeat"));
  EXPECT_THAT(Parse({"model.gguf", "--prompt-tokens", "-1"}, flags), HasSubstr("--prompt-tokens"));
  flags = {};
  flags.engine.model = "/nowhere/model.gguf";
  flags.batch = {300};
  EXPECT_THAT(std::string(RunBench(flags).message()), HasSubstr("--batch: 300 sequences exceed --max-num-seqs 256"));
  flags.batch = {100};
  flags.engine.max_num_batched_tokens = "100";
  flags.engine.max_num_seqs = 100;
  EXPECT_THAT(std::string(RunBench(flags).message()),
              HasSubstr("leave no room for prompts within --max-num-batched-tokens 100"));
}

TEST(BenchCommand, MeasuresAModelAndPrintsJson) {
  DOVETAIL_DATA_OR_SKIP(const auto model, "models/stories260K/stories260K-f16.gguf");
  BenchFlags flags;
  flags.engine.model = model.string();
  flags.engine.threads = 2;
  flags.prompt_tokens = 100;
  flags.output_tokens = 20;
  flags.batch = {0, 3};
  flags.batch_prompt_tokens = 30;
  flags.batch_output_tokens = 200;  // far more than are decoded while the last of three is being submitted
  flags.repeat = 2;
  flags.json = true;
  ::testing::internal::CaptureStdout();
  const absl::Status status = RunBench(flags);
  const std::string output = ::testing::internal::GetCapturedStdout();
  ASSERT_TRUE(status.ok()) << status;
  const auto json = nlohmann::json::parse(output);
  EXPECT_EQ(json["threads"], 2);
  EXPECT_GT(json["weight_bytes"].get<double>(), 2.6e5);
  EXPECT_GT(json["memory_read_bytes_per_s"].get<double>(), 0);
  const auto& rows = json["measurements"];
  ASSERT_EQ(rows.size(), 3u);  // no row for a batch of 0
  const std::vector<int> sequences = {1, 1, 3}, prompts = {1, 100, 30}, outputs = {20, 0, 200};
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(rows[i]["sequences"], sequences[i]);
    EXPECT_EQ(rows[i]["prompt_tokens"], prompts[i]);
    EXPECT_EQ(rows[i]["output_tokens"], outputs[i]);
    EXPECT_EQ(rows[i]["tokens_per_s"]["all"].size(), 2u);
    EXPECT_GT(rows[i]["tokens_per_s"]["min"].get<double>(), 0);
    EXPECT_EQ(rows[i].contains("share_of_memory_limit"), i != 1);  // says nothing about a prefill
  }
}

TEST(BenchCommand, RefusesLengthsBeyondTheModelsPositions) {
  DOVETAIL_DATA_OR_SKIP(const auto model, "models/stories260K/stories260K-f16.gguf");
  BenchFlags flags;
  flags.engine.model = model.string();
  flags.prompt_tokens = 5000;
  EXPECT_THAT(std::string(RunBench(flags).message()), HasSubstr("--prompt-tokens: needs sequences of 5001 tokens"));
}

}  // namespace
}  // namespace dovetail::cli
