// `dovetail logits` with the flags of a cluster: the file is the same for every number of ranks and every exchange, and
// what crosses is what `dovetail plan-prefill` says.
#include <gmock/gmock.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "tests/cluster/tiny_hybrid.h"
#include "tests/cluster/tiny_model.h"
#include "tests/golden/golden.h"
#include "tests/server/serve_process.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

std::string Ids(int count) {
  std::vector<int> ids;
  for (int i = 0; i < count; ++i) ids.push_back(5 + (i * i + 7 * i) % 90);
  return absl::StrJoin(ids, ",");
}

struct Family {
  std::string name, model;
  int tokens = 450, vocabulary = 97;
  bool hybrid = false;
  int kv_heads = 2;
};

class LogitsOverRanks : public testing::Test {
 protected:
  std::filesystem::path folder_ = dovetail::test::TempFolder();
  std::vector<Family> families_ = {
      {"softmax", dovetail::test::WriteTinyModel({}, folder_).string()},
      {"windows",
       dovetail::test::WriteTinyModel({.architecture = "gemma3", .window = 90, .seed = 2}, folder_).string()},
      {"hybrid", dovetail::test::WriteTinyFolder(dovetail::test::TinyGatedDeltaConfig(), 4, folder_ / "h").string(),
       450, 97, true},
  };

  // The file that it wrote, and what it printed.
  std::pair<std::string, Json> Logits(const Family& family, std::vector<std::string> flags) {
    const std::string path = (folder_ / "logits.npy").string();
    std::filesystem::remove(path);
    std::vector<std::string> arguments = {"logits",   family.model, "--ids",     Ids(family.tokens),
                                          "--last",   "0",          "--greedy",  "3",
                                          "--device", "cpu",        "--threads", "2",
                                          "--out",    path,         "--dtype",   "float32"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return {dovetail::test::ReadFile(path), Json::parse(result.out)};
  }

  static bool IsDirect(const std::string& exchange) {
    return exchange == "gather-direct" || exchange == "ring" || exchange == "switch" || exchange == "pass-q";
  }

  // What `dovetail plan-prefill` says of the same prompt.
  static Json PlannedBytes(const Family& family, const std::string& exchange, int ranks) {
    const CommandResult result =
        RunDovetail({"plan-prefill", family.model, "--tokens", std::to_string(family.tokens), "--ranks",
                     std::to_string(ranks), "--link", "nvlink", "--prefill-rank-tokens", "64",
                     "--max-num-batched-tokens", "512", "--kv-cache-dtype", "float32", "--json"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const Json plan = Json::parse(result.out);
    const bool hands_on = exchange == "chain" || IsDirect(exchange);
    const std::string softmax = exchange == "chain" ? "plane" : exchange;
    const std::string linear = exchange == "switch" ? "" : hands_on ? " + chain" : " + state";  // one name for both
    const std::string name = family.hybrid ? softmax + linear : softmax;
    for (const Json& row : plan["plans"][0]["exchanges"])
      if (row["exchange"] == name && row["built"] == true) return row["bytes"];
    ADD_FAILURE() << "no " << name << " in " << result.out;
    return {};
  }
};

TEST_F(LogitsOverRanks, OneFileForEveryNumberOfRanksAndEveryExchange) {
  // Windows of 16 tokens in every other layer, sinks, and experts; 256 positions.
  families_.push_back({"heads",
                       dovetail::test::WriteTinyModel({.heads = 10, .kv_heads = 5, .seed = 9}, folder_).string(), 450,
                       97, false, 5});
  const std::filesystem::path sinks = dovetail::test::GoldenFolder("moe", "gpt_oss");
  if (!sinks.empty()) families_.push_back({"sinks", sinks.string(), 250, 320});
  for (const Family& family : families_) {
    const auto [alone, said_alone] = Logits(family, {});
    const size_t values = static_cast<size_t>(family.tokens) * family.vocabulary;
    ASSERT_EQ(alone.size(), 128u + values * sizeof(float)) << family.name;
    EXPECT_FALSE(said_alone.contains("prefill"));
    for (const std::string exchange : {"plane", "gather", "gather-direct", "ring", "switch", "pass-q", "chain"}) {
      if (exchange == "chain" && !family.hybrid) continue;  // there are no states
      for (const int ranks : {1, 2, 3}) {
        if (exchange == "switch" && ranks > family.kv_heads) continue;
        SCOPED_TRACE(absl::StrCat(family.name, ", ", exchange, ", ", ranks, " ranks"));
        const auto [file, said] = Logits(family, {"--compute-workers", "3", "--prefill-ranks", std::to_string(ranks),
                                                  "--prefill-rank-tokens", "64", "--prefill-exchange", exchange});
        EXPECT_TRUE(file == alone);
        EXPECT_EQ(said["greedy_ids"], said_alone["greedy_ids"]);
        const Json& prefill = said["prefill"];
        EXPECT_EQ(prefill["groups"], ranks > 1 ? 1 : 0);
        EXPECT_EQ(prefill["group_tokens"], ranks > 1 ? family.tokens : 0);
        const bool direct = IsDirect(exchange);
        EXPECT_EQ(prefill["bytes"]["plane"] > 0, ranks > 1 && (exchange == "plane" || exchange == "chain"));
        EXPECT_EQ(prefill["bytes"]["gather"] > 0, ranks > 1 && exchange == "gather");
        for (const char* between : {"gather-direct", "ring", "switch", "pass-q"})
          EXPECT_EQ(prefill["bytes"][between] > 0, ranks > 1 && exchange == between);
        EXPECT_EQ(prefill["bytes"]["state"] > 0, family.hybrid);
        EXPECT_EQ(prefill["bytes"]["chain"] > 0,
                  ranks > 1 && family.hybrid && ((direct && exchange != "switch") || exchange == "chain"));
        EXPECT_EQ(prefill["bytes"], PlannedBytes(family, exchange, ranks));
      }
    }
  }
}

TEST_F(LogitsOverRanks, AFlagThatCannotBeMetSaysWhyAndWhatCan) {
  const std::string linear =
      dovetail::test::WriteTinyFolder(dovetail::test::TinyMamba2Config(), 5, folder_ / "linear").string();
  const std::string few_heads =
      dovetail::test::WriteTinyFolder(
          absl::StrReplaceAll(dovetail::test::TinyMamba2Config(),
                              {{"\"num_heads\": 8", "\"num_heads\": 4"}, {"\"head_dim\": 16", "\"head_dim\": 32"}}),
          5, folder_ / "few_heads")
          .string();
  const std::string& softmax = families_[0].model;
  struct Case {
    std::string model;
    std::vector<std::string> flags;
    std::string said;
  };
  const std::vector<Case> cases = {
      {softmax,
       {"--compute-workers", "2", "--prefill-ranks", "3"},
       "--prefill-ranks: 3 ranks are more than the 2 of --compute-workers; ask for at most as many, for auto, or for "
       "more compute workers"},
      {softmax,
       {"--compute-workers", "2", "--prefill-ranks", "2", "--no-enable-chunked-prefill"},
       "--prefill-ranks: 2 ranks divide a prompt, which --no-enable-chunked-prefill forbids; take 1 or auto, or leave "
       "chunked prefill on"},
      {softmax,
       {"--compute-workers", "2", "--prefill-ranks", "2"},
       "--prefill-ranks: 2 ranks of at least 1024 tokens (--prefill-rank-tokens) need a prompt of 2048, and this one "
       "has 450; lower the one or the other"},
      {softmax,
       {"--compute-workers", "3", "--prefill-ranks", "3", "--prefill-rank-tokens", "64", "--prefill-exchange",
        "switch"},
       "--prefill-exchange switch: 3 ranks (--prefill-ranks) cannot each have one of the 2 KV heads of this model; ask "
       "for at most 2, or take gather-direct or ring"},
      {dovetail::test::WriteTinyModel({.heads = 4, .kv_heads = 1, .seed = 8}, folder_).string(),
       {"--compute-workers", "2", "--prefill-exchange", "switch"},
       "--prefill-exchange switch: ranks divide the KV heads among each other, and this model has one; take "
       "gather-direct, ring or plane"},
      {linear,
       {"--prefill-exchange", "switch", "--linear-prompts", "attention"},
       "--prefill-exchange switch: all attention layers of this model are linear, and --linear-prompts attention runs "
       "these elsewhere; take plane, or --linear-prompts compute"},
      {few_heads,
       {"--compute-workers", "5", "--prefill-ranks", "5", "--prefill-rank-tokens", "64", "--prefill-exchange",
        "switch"},
       "--prefill-exchange switch: 5 ranks cannot each have one of the 4 heads of this model's linear layers; ask for "
       "at "
       "most 4, or take chain or plane"},
      {softmax,
       {"--compute-devices", "cuda:0,cuda:1"},
       "--compute-devices cuda:0,cuda:1: it says where the layers run, and so does --device cpu; leave that out"},
      {softmax,
       {"--device", "auto", "--compute-devices", "cuda:0,cpu"},
       "--compute-devices: 'cpu' is not cuda:N, as in cuda:0,cuda:1; `dovetail devices` lists what is here"},
      {softmax,
       {"--device", "auto", "--compute-devices", "cuda:0,cuda:1,cuda:2", "--compute-workers", "2"},
       "--compute-devices: 3 devices are more than the 2 of --compute-workers; leave --compute-workers out, or take "
       "fewer devices"},
      {softmax,
       {"--device", "auto", "--compute-devices", "cuda:0,cuda:1", "--prefill-ranks", "3"},
       "--prefill-ranks: 3 ranks are more than the 2 of --compute-workers; ask for at most as many, for auto, or for "
       "more compute workers"},
      {softmax,
       {"--device", "auto", "--compute-devices", "cuda:0,cuda:1,cuda:2,cuda:3,cuda:4,cuda:5,cuda:6,cuda:7,cuda:8"},
       "--compute-devices: 9 devices; 8 are the most"},
      {softmax,
       {"--prefill-exchange", "gather", "--prompt-scratch", "0"},
       "--prefill-exchange gather: K and V that are gathered lie in the prompt scratch, and --prompt-scratch is 0; "
       "give "
       "it memory, or take plane"},
      {linear,
       {"--prefill-exchange", "gather"},
       "--prefill-exchange gather: all attention layers of this model are linear; their states cross in any case, and "
       "there is no K and V to gather; take plane"},
      {linear,
       {"--prefill-exchange", "gather-direct"},
       "--prefill-exchange gather-direct: all attention layers of this model are linear; their states cross in any "
       "case, and there is no K and V to gather; take chain"},
      {softmax,
       {"--prefill-exchange", "gather-direct", "--prompt-scratch", "0"},
       "--prefill-exchange gather-direct: K and V that are gathered lie in the prompt scratch, and --prompt-scratch is "
       "0; give it memory, or take plane"},
      {softmax,
       {"--prefill-exchange", "chain"},
       "--prefill-exchange chain: ranks hand on the states of linear layers, and this model has none; take plane or "
       "gather"},
      {linear,
       {"--prefill-exchange", "chain", "--linear-prompts", "attention"},
       "--prefill-exchange chain: the states are those of compute workers, and --linear-prompts attention runs linear "
       "layers elsewhere; take plane, or --linear-prompts compute"},
  };
  for (const Case& bad : cases) {
    std::vector<std::string> arguments = {"logits", bad.model, "--ids", Ids(450)};
    if (std::find(bad.flags.begin(), bad.flags.end(), "--device") == bad.flags.end())
      arguments.insert(arguments.end(), {"--device", "cpu"});
    arguments.insert(arguments.end(), bad.flags.begin(), bad.flags.end());
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, 1) << bad.said;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err, "dovetail: " + bad.said + "\n");
  }
}

// Softmax layers alone, linear ones between them, and linear ones alone. The models are so small that attention may
// take no time; what cannot be measured stays assumed.
TEST_F(LogitsOverRanks, PlanPrefillMeasuresTheRatesOfThisMachine) {
  const std::string linear =
      dovetail::test::WriteTinyFolder(dovetail::test::TinyMamba2Config(), 5, folder_ / "linear").string();
  for (const std::string& model : {families_[0].model, families_[2].model, linear}) {
    SCOPED_TRACE(model);
    const CommandResult result =
        RunDovetail({"plan-prefill", model, "--tokens", "1K", "--ranks", "2", "--measure", "--threads", "1", "--json"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const Json rates = Json::parse(result.out)["rates"];
    EXPECT_EQ(rates["dense"]["source"], "measured");
    for (const char* rate : {"dense", "attention", "attention_workers"}) EXPECT_GT(rates[rate]["value"], 0) << rate;
    if (model == linear) {
      EXPECT_EQ(rates["attention"]["source"], "assumed");
      EXPECT_EQ(rates["attention_workers"]["source"], "assumed");
    }
  }
}

TEST_F(LogitsOverRanks, PlanPrefillLabelsWhatIsSimulatedAndNamesWhatIsWrong) {
  const std::string& softmax = families_[0].model;
  const std::string rates = (folder_ / "rates.json").string();
  std::ofstream(rates) << R"({"dense_tokens_per_s": 1000, "attention_flops_per_s": 1e9})";
  const CommandResult table =
      RunDovetail({"plan-prefill", softmax, "--tokens", "1M", "--ranks", "1,8", "--link", "nvlink", "--rates", rates});
  EXPECT_EQ(table.exit_code, 0) << table.err;
  for (const char* said : {"a prompt of 1048576 tokens after 0 cached ones\n", "dense layers 1000 tokens/s (measured)",
                           "attention 0.001 TFLOP/s (measured)", "attention workers together: 304 TFLOP/s (assumed)",
                           "\n8 ranks, nvlink: 450 GB/s, 2 us a message\n", "predicted\n", "simulated\n",
                           "not possible: more ranks than the 4 query heads"})
    EXPECT_THAT(table.out, HasSubstr(said));
  const std::vector<std::pair<std::vector<std::string>, std::string>> mistakes = {
      {{"--tokens", "many"}, "--tokens: 'many' is no number of tokens up to 2^30; write 131072, 128K or 1M"},
      {{"--tokens", "0"}, "--tokens: 0 tokens are no prompt; write 128K"},
      {{"--ranks", "0"}, "--ranks: '0' is no number of ranks in 1..4096; write 8, or 4,8,16"},
      {{"--link", "wet string"},
       "--link: 'wet string' is none of nvlink, rdma-400g and ethernet-25g; or write bandwidth and latency, as "
       "12.5GB/s:10us"},
      {{"--rates", "/none"}, "--rates: cannot read /none"},
  };
  for (const auto& [flags, said] : mistakes) {
    std::vector<std::string> arguments = {"plan-prefill", softmax};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, 1) << said;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err, "dovetail: " + said + "\n");
  }
}

}  // namespace
}  // namespace dovetail::server::test
