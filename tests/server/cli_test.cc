// The `dovetail` binary on the command line: help, what it says of mistakes, and what it prints.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_split.h"
#include "model/tokenizer/byte_level.h"
#include "tests/server/serve_process.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::vector<std::string> kCommands = {"serve", "run", "inspect", "bench", "plan-prefill", "logits"};

int Lines(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

TEST(Cli, HelpIsGroupedAndFitsATerminal) {
  const CommandResult whole = RunDovetail({"--help"});
  EXPECT_EQ(whole.exit_code, 0);
  for (const std::string& command : kCommands) {
    EXPECT_THAT(whole.out, HasSubstr("\n  " + command + " "));
    const CommandResult help = RunDovetail({command, "--help"});
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_EQ(help.err, "");
    const std::string model = command == "bench" ? " [MODEL]" : " MODEL";  // `bench serve` has none
    EXPECT_THAT(help.out, HasSubstr("Usage: dovetail " + command + model));
    EXPECT_THAT(help.out, HasSubstr("Examples:\n  dovetail " + command));
    for (const auto line : absl::StrSplit(help.out, '\n')) EXPECT_LE(line.size(), 100u) << line;
  }
  EXPECT_THAT(RunDovetail({"bench", "serve", "--help"}).out, HasSubstr("Usage: dovetail bench serve [flags]"));
  EXPECT_THAT(RunDovetail({"bench"}).err, HasSubstr("bench: MODEL is required"));
  EXPECT_THAT(RunDovetail({"bench", "serve", "--prot", "1"}).err,
              HasSubstr("bench serve: there is no flag --prot; did you mean --port?"));
  const std::string serve = RunDovetail({"serve", "--help"}).out;
  for (const char* group : {"\nModel:\n", "\nKV cache:\n", "\nScheduling:\n", "\nDisaggregation:\n", "\nAPI:\n"})
    EXPECT_THAT(serve, HasSubstr(group));
  for (const char* flag : {"--host", "--port", "--api-key", "--served-model-name", "--max-model-len", "--max-num-seqs",
                           "--max-num-batched-tokens", "--block-size", "--kv-cache-dtype", "--state-dtype",
                           "--enable-prefix-caching", "--seed", "--chat-template"})
    EXPECT_THAT(serve, HasSubstr(absl::StrCat("  ", flag)));
  for (const char* standard : {"[8000]", "[256]", "[127.0.0.1]", "[64]", "[auto]", "[on]"})
    EXPECT_THAT(serve, HasSubstr(standard));
  EXPECT_EQ(RunDovetail({"--version"}).out, "dovetail 0.1.0\n");
}

struct Mistake {
  std::vector<std::string> arguments;
  std::string said;
};

const std::string kAllCommands =
    "serve, run, up, scheduler, attention-worker, compute-worker, pair-worker, server, status, drain, inspect, "
    "devices, "
    "bench, plan, plan-prefill, logits";

TEST(Cli, AMistakeIsNamedInOneLineWithTheRemedy) {
  const std::vector<Mistake> mistakes = {
      {{}, "say what to do: " + kAllCommands + "; `dovetail --help` explains"},
      {{"serv", "m"}, "there is no command 'serv'; did you mean serve?"},
      {{"inspct", "m"}, "there is no command 'inspct'; did you mean inspect?"},
      {{"frobnicate"}, "there is no command 'frobnicate'; there are " + kAllCommands},
      {{"--port", "1"}, "there is no flag '--port' before the command; there are " + kAllCommands},
      {{"serve"}, "serve: MODEL is required"},
      {{"serve", "m", "n"},
       "serve: there are more arguments than this command takes; `dovetail serve --help` lists them"},
      {{"serve", "m", "--max-model-length", "5"},
       "serve: there is no flag --max-model-length; did you mean --max-model-len?"},
      {{"serve", "m", "--max-model-lenn=5"}, "serve: there is no flag --max-model-lenn; did you mean --max-model-len?"},
      {{"serve", "m", "--prot", "1"}, "serve: there is no flag --prot; did you mean --port?"},
      {{"serve", "m", "--no-prefix-caching"},
       "serve: there is no flag --no-prefix-caching; did you mean --no-enable-prefix-caching?"},
      {{"serve", "m", "--tensor-parallel-size", "2"},
       "serve: there is no flag --tensor-parallel-size: layers are not cut over GPUs here; --compute-workers and "
       "--attention-devices (of `up`) spread the work"},
      {{"serve", "m", "--gpu-memory-utilization=0.9"},
       "serve: there is no flag --gpu-memory-utilization: the KV cache takes what is free; --kv-cache-memory-bytes (of "
       "a worker: --kv-capacity) sets its size"},
      {{"serve", "--model", "m"},
       "serve: there is no flag --model: the model is the argument behind the command, as in `dovetail serve MODEL`"},
      {{"run", "m", "hi", "--temprature", "1"}, "run: there is no flag --temprature; did you mean --temperature?"},
      {{"serve", "m", "--port", "65536"}, "serve: --port: 65536 is outside 0..65535; 0 takes a free one"},
      {{"serve", "m", "--port", "-1"}, "serve: --port: -1 is outside 0..65535; 0 takes a free one"},
      {{"serve", "m", "--port", "http"},
       "serve: --port: 'http' is not a whole number; give one in 0..65535; 0 takes a free one"},
      {{"serve", "m", "--port", "80.5"},
       "serve: --port: '80.5' is not a whole number; give one in 0..65535; 0 takes a free one"},
      {{"serve", "m", "--port", "99999999999999999999"},
       "serve: --port: 99999999999999999999 is outside 0..65535; 0 takes a free one"},
      {{"serve", "m", "--max-num-seqs", "0"}, "serve: --max-num-seqs: 0 is outside 1..4096"},
      {{"serve", "m", "--max-num-batched-tokens", "65473"},
       "serve: --max-num-batched-tokens: 65473 is outside 1..65472; auto chooses by the device"},
      {{"serve", "m", "--prefill-itl-budget", "-1"},
       "serve: --prefill-itl-budget: -1 is outside 0..600000; or auto; 0 is no limit"},
      {{"up", "m", "--prefill-itl-budget", "soon"},
       "up: --prefill-itl-budget: 'soon' is not a number; give one in 0..600000; or auto; 0 is no limit"},
      {{"serve", "m", "--block-size", "16"},
       "serve: --block-size: 16 is outside 64..64; KV blocks have one size; leave the flag out"},
      {{"serve", "m", "--kv-cache-dtype", "fp8_e5m2"},
       "serve: --kv-cache-dtype: 'fp8_e5m2' is none of auto, bfloat16, float16, float32, int8, int8_per_token_head, "
       "fp8, "
       "fp8_e4m3"},
      {{"attention-worker", "--kv-cache-dtype", "float32"},
       "attention-worker: --kv-cache-dtype: 'float32' is none of auto, int8, int8_per_token_head, fp8, fp8_e4m3"},
      {{"serve", "m", "--state-dtype", "float16"},
       "serve: --state-dtype: 'float16' is none of float32, bfloat16, f32, bf16"},
      {{"serve", "m", "--dtype", "int3"}, "serve: --dtype: 'int3' is none of auto, float32, bfloat16"},
      {{"serve", "m", "--placement", "layers"},
       "serve: --placement: 'layers' is none of request, heads, tokens, mixed, tiers"},
      {{"serve", "m", "--attention-workers", "65"}, "serve: --attention-workers: 65 is outside 1..64"},
      {{"up", "m", "--spares", "-1"}, "up: --spares: -1 is outside 0..16; 0 keeps none"},
      {{"up", "m", "--spares", "17"}, "up: --spares: 17 is outside 0..16; 0 keeps none"},
      {{"serve", "m", "--micro-batches", "17"},
       "serve: --micro-batches: 17 is outside 0..16; 0 takes as many as the measured times ask for"},
      {{"serve", "m", "--threads", "1000"}, "serve: --threads: 1000 is outside 0..256; 0 takes one per core"},
      {{"serve", "m", "--overload-status", "418"}, "serve: --overload-status: '418' is none of 503, 429"},
      {{"serve", "m", "--max-queued-work", "0"}, "serve: --max-queued-work: 0 is outside 1..1048576"},
      {{"serve", "m", "--max-connections", "0"}, "serve: --max-connections: 0 is outside 1..1048576"},
      {{"serve", "m", "--shutdown-timeout", "-1"}, "serve: --shutdown-timeout: -1 is outside 0..86400"},
      {{"serve", "m", "--seed", "-1"}, "serve: --seed: -1 is outside 0..9223372036854775807"},
      {{"run", "m", "hi", "--temperature", "nan"}, "run: --temperature: 'nan' is not a number; give one in 0..100"},
      {{"run", "m", "hi", "--max-tokens", "0"}, "run: --max-tokens: 0 is outside 1..67108864"},
      {{"logits", "m", "--ids", "1", "--last", "-2"}, "logits: --last: -2 is outside 0..2147483647"},
      {{"serve", "m", "--port"}, "serve: --port needs a value"},
      {{"serve", "m", "--port", "1", "--port=2"}, "serve: --port is given 2 times; give it once"},
      {{"bench", "m", "--repeat", "2", "--repeat", "3"}, "bench: --repeat is given 2 times; give it once"},
  };
  for (const Mistake& mistake : mistakes) {
    const CommandResult result = RunDovetail(mistake.arguments);
    EXPECT_EQ(result.exit_code, 2) << mistake.said;
    EXPECT_EQ(result.out, "");
    EXPECT_EQ(result.err, "dovetail: " + mistake.said + "\n");
  }
}

TEST(Cli, CheckFlagsSaysWhatIsWrongWithARolesFlagsAndOpensNothing) {
  const std::vector<Mistake> checked = {
      {{"scheduler", "--listen", "0.0.0.0:7100", "--lanes", "tcp", "--data-ports", "7200-7299", "--tls-cert", "/none",
        "--tls-key", "/none", "--tls-ca", "/none", "--join-token-file", "/none"},
       ""},
      {{"scheduler", "--data-ports", "7200"}, "--data-ports: '7200' is no range of ports"},
      {{"scheduler", "--listen", "here"}, "--listen: 'here' is no address"},
      {{"scheduler", "--max-num-batched-tokens", "128"}, "--max-num-batched-tokens: 128 is less than"},
      {{"attention-worker", "--scheduler", "name.example:7100", "--kv-capacity", "8GiB", "--device", "cuda:7"}, ""},
      {{"attention-worker", "--kv-capacity", "8Gi"},
       "--kv-capacity: '8Gi' is no size; write 8GiB, 512MiB or a number of bytes, or auto"},
      {{"attention-worker", "--device", "gpu"}, "--device: 'gpu' is neither cpu nor cuda:N"},
      {{"attention-worker", "--tls-cert", "/none"}, "--tls-cert, --tls-key and --tls-ca: give all three"},
      {{"compute-worker", "/none", "--device", "cuda"}, ""},
      {{"compute-worker", "/none", "--device", "gpu"}, "--device: 'gpu' is none of auto, cpu, cuda and cuda:N"},
      {{"compute-worker", "/none", "--prompt-scratch", "much"},
       "--prompt-scratch: 'much' is no size; write 8GiB, 512MiB or a number of bytes, or auto, or own"},
      {{"pair-worker", "/none", "--device", "cuda:7", "--kv-capacity", "auto"}, ""},
      {{"pair-worker", "/none", "--kv-capacity", "8Gi"}, "--kv-capacity: '8Gi' is no size"},
      {{"pair-worker", "/none", "--device", "gpu"}, "--device: 'gpu' is none of auto, cpu, cuda and cuda:N"},
      {{"server", "--host", "0.0.0.0", "--api-key-file", "/none", "--ssl-certfile", "/none", "--ssl-keyfile", "/none"},
       ""},
      {{"server", "--scheduler", "7100"}, "--scheduler: '7100' is no address"},
      {{"server", "--grpc-listen", "9000"}, "--grpc-listen: '9000' is no address"},
      {{"server", "--allowed-origins", "*"}, "--allowed-origins: '*' is no JSON list of texts"},
  };
  for (const Mistake& flags : checked) {
    std::vector<std::string> arguments = flags.arguments;
    arguments.push_back("--check-flags");
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, flags.said.empty() ? 0 : 1) << result.err;
    EXPECT_EQ(result.out, "");
    EXPECT_THAT(result.err, HasSubstr(flags.said));
    if (flags.said.empty()) {
      EXPECT_EQ(result.err, "");
    }
  }
  EXPECT_EQ(RunDovetail({"scheduler", "--lanes", "ether", "--check-flags"}).exit_code, 2);
}

class CliWithModel : public testing::Test {
 protected:
  void SetUp() override {
    DOVETAIL_DATA_OR_SKIP(const auto model, "models/stories260K/stories260K-f32.gguf");
    model_ = model.string();
  }
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = (folder_ / name).string();
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  std::string model_;
  std::filesystem::path folder_ = dovetail::test::TempFolder();
};

TEST_F(CliWithModel, EveryFailureToStartIsOneLineAndNotZero) {
  const std::string bytes = dovetail::test::ReadFile(model_);
  const std::string cut = Write("cut.gguf", bytes.substr(0, bytes.size() / 2));
  const std::string magic = Write("magic.gguf", "GGML" + bytes.substr(4));
  const std::string broken = Write("broken.jinja", "{% for m in messages %}");
  ServeProcess other({model_});
  const std::vector<Mistake> mistakes = {
      {{"serve", "no-such-model"}, "no-such-model: no such file or folder"},
      {{"serve", folder_.string()}, "holds 2 GGUF models; name one of them"},
      {{"serve", "/no/such/model.gguf"}, "/no/such/model.gguf: no such file or folder"},
      {{"serve", cut}, cut + ": "},
      {{"serve", cut}, "cut.gguf"},
      {{"inspect", cut}, "cut.gguf"},
      {{"inspect", cut}, cut + ": "},
      {{"serve", magic}, "magic.gguf"},
      {{"run", magic, "hi"}, "magic.gguf"},
      {{"serve", model_, "--port", std::to_string(other.port())}, "choose another --port"},
      {{"serve", model_, "--host", "999.1.2.3"}, "--host"},
      {{"serve", model_, "--host", ""}, "--host: is empty"},
      {{"serve", model_, "--api-key", "two words"}, "--api-key: a key may only have visible ASCII characters"},
      {{"serve", model_, "--allowed-origins", "*"}, "--allowed-origins: '*' is no JSON list of texts"},
      {{"serve", model_, "--allowed-origins", R"(["https://x.example/"])"}, "'https://x.example/' is no origin"},
      {{"serve", model_, "--served-model-name", ""}, "--served-model-name: a name has 1 to 512 bytes"},
      {{"serve", model_, "--max-model-len", "513"}, "--max-model-len: 513 exceeds the 512 positions"},
      {{"serve", model_, "--max-num-batched-tokens", "128"},
       "--max-num-batched-tokens: 128 is less than --max-num-seqs 256"},
      {{"serve", model_, "--kv-cache-memory-bytes", "12KB"}, "--kv-cache-memory-bytes: 12000 bytes hold less than"},
      {{"serve", model_, "--kv-cache-memory-bytes", "0"}, "--kv-cache-memory-bytes: a KV cache of no bytes"},
      {{"serve", model_, "--kv-cache-memory-bytes", "8 chickens"}, "'8 chickens' is no size; write 8GiB"},
      {{"serve", model_, "--chat-template", "chatlm"},
       "--chat-template: there is no file and no built-in template 'chatlm'; built in are chatml, "},
      {{"serve", model_, "--chat-template", broken}, "--chat-template broken.jinja: chat template line 1"},
      {{"logits", model_, "--ids", "1,x"}, "--ids: 'x' is no token id; write them as 1,2,3"},
      {{"logits", model_, "--ids", "1,,3"}, "--ids: '' is no token id; write them as 1,2,3"},
      {{"logits", model_, "--ids", ""}, "--ids: '' is no token id; write them as 1,2,3"},
      {{"serve", model_, "--host", "no-such-host.invalid"},
       "--host: no-such-host.invalid is no IP address, and no name"},
      {{"logits", model_, "--ids", "1,512"}, "prompt: token 512 is outside the vocabulary of 512"},
      {{"logits", model_, "--ids", "1", "--last", "2"}, "--last: 2 is outside 0..1"},
      {{"logits", model_, "--ids", "1", "--out", (folder_ / "no" / "x.npy").string()}, "--out: cannot write"},
  };
  for (const Mistake& mistake : mistakes) {
    std::vector<std::string> arguments = mistake.arguments;
    if (arguments[0] == "serve" && std::find(arguments.begin(), arguments.end(), "--port") == arguments.end())
      arguments.insert(arguments.end(), {"--port", "0"});
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, 1) << mistake.said;
    EXPECT_EQ(result.out, "") << mistake.said;
    EXPECT_THAT(result.err, StartsWith("dovetail: "));
    EXPECT_THAT(result.err, HasSubstr(mistake.said));
    EXPECT_EQ(Lines(result.err), 1) << result.err;
  }
}

TEST(Cli, StatesLargerThanTheMemoryAreNamedBeforeAnythingStarts) {
  const std::string model = dovetail::test::ProjectData("../../models/tales-hybrid").string();
  for (const char* command : {"serve", "up", "run"}) {
    std::vector<std::string> arguments = {command, model, "--kv-cache-memory-bytes", "300KiB"};
    arguments.push_back(std::string(command) == "run" ? "hi" : "--port");
    if (arguments.back() == "--port") arguments.push_back("0");
    const CommandResult result = RunDovetail(arguments);
    EXPECT_EQ(result.exit_code, 1) << command;
    EXPECT_EQ(result.out, "") << command;
    EXPECT_EQ(result.err,
              "dovetail: --kv-cache-memory-bytes: 307200 bytes hold less than 128 tokens; "
              "this model needs 917504 bytes per 64 tokens and worker, 884736 of them for linear states (twice, at any "
              "length)\n")
        << command;
  }
}

TEST_F(CliWithModel, InspectPrintsWhatTheFileHoldsAndNeeds) {
  const CommandResult result = RunDovetail({"inspect", model_});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  for (const char* said : {"stories260K-f32.gguf: GGUF version 3\n", "architecture   llama", "5 full attention",
                           "8 query, 4 key/value, of 8 dimensions", "context        512 positions",
                           "vocabulary     512 tokens", "chat template  no", "F32", "\nneeds\n",
                           "weights        1015.8 KiB", "KV cache       640 B per token in bfloat16"})
    EXPECT_THAT(result.out, HasSubstr(said));
}

TEST(Cli, DevicesListsTheCpuAndSaysWhatGpusLack) {
  const CommandResult result = RunDovetail({"devices"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, HasSubstr("cpu      "));
  EXPECT_THAT(result.out, ContainsRegex("cores, AVX(2|-512)"));
  EXPECT_THAT(result.out,
              ContainsRegex("cuda:0   |cuda     not usable: (no CUDA library|no NVIDIA driver|the NVIDIA driver)"));
}

TEST_F(CliWithModel, RunAnswersAndShowsABarOnlyOnATerminal) {
  const std::vector<std::string> arguments = {"run", model_, "Once upon a time", "--max-tokens", "9"};
  const CommandResult plain = RunDovetail(arguments);
  EXPECT_EQ(plain.exit_code, 0);
  EXPECT_EQ(plain.out, ", there was a little girl named\n");
  EXPECT_EQ(plain.err, "");
  const CommandResult shown = RunDovetail(arguments, /*terminal=*/true);
  EXPECT_EQ(shown.out, plain.out);
  EXPECT_THAT(shown.err, HasSubstr("loading ["));
  EXPECT_THAT(shown.err, HasSubstr("100 %"));
  EXPECT_EQ(RunDovetail({"run", model_, "Once upon a time", "--max-tokens", "100000"}).exit_code,
            0);  // to the model's end
}

TEST_F(CliWithModel, AChatTemplateIsAFileOrABuiltIn) {
  const std::string file = Write("mine.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}, there was a");
  const auto prompt = [&](const std::string& chat_template) {
    ServeProcess server({model_, "--chat-template", chat_template});
    const std::string chat = R"({"messages":[{"role":"user","content":"Once"}],"return_token_strs":true})";
    return server.AskJson(Post("/tokenize", chat));
  };
  std::string text;
  const Json own = prompt(file);
  for (const Json& piece : own["token_strs"]) text += piece.get<std::string>();
  EXPECT_EQ(text, " Once, there was a");
  for (const char* name : {"chatml", "llama2", "zephyr", "phi3"})
    EXPECT_GT(prompt(name)["count"].get<int>(), 5) << name;
}

// A Hugging Face folder with a byte-level tokenizer that has these control tokens, and no chat template.
std::filesystem::path FolderWith(const std::vector<std::string>& control_tokens) {
  const auto weights = dovetail::test::TestData("models/stories260K/hf");
  const std::filesystem::path folder = dovetail::test::TempFolder();
  for (const char* file : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(*weights / file, folder / file);
  Json vocab = Json::object(), added = Json::array();
  for (int byte = 0; byte < 256; ++byte) vocab[model::SpellingOfBytes(std::string(1, static_cast<char>(byte)))] = byte;
  for (size_t i = 0; i < control_tokens.size(); ++i)
    added.push_back({{"id", 256 + i},
                     {"content", control_tokens[i]},
                     {"special", true},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false}});
  const Json tokenizer = {{"version", "1.0"},
                          {"added_tokens", added},
                          {"normalizer", nullptr},
                          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
                          {"post_processor", nullptr},
                          {"decoder", {{"type", "ByteLevel"}}},
                          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
  std::ofstream(folder / "tokenizer.json") << Dump(tokenizer);
  return folder;
}

TEST_F(CliWithModel, AModelWithoutATemplateGetsTheBuiltInOneThatItsVocabularyIsMadeFor) {
  DOVETAIL_DATA_OR_SKIP([[maybe_unused]] const auto folder, "models/stories260K/hf");
  const std::string chat = R"({"messages":[{"role":"user","content":"hi"}],"return_token_strs":true})";
  ServeProcess chatml({FolderWith({"<|im_start|>", "<|im_end|>"}).string()});
  EXPECT_EQ(Dump(chatml.AskJson(Post("/tokenize", chat))["token_strs"]),
            R"(["<|im_start|>","u","s","e","r","\n","h","i","<|im_end|>","\n",)"
            R"("<|im_start|>","a","s","s","i","s","t","a","n","t","\n"])");
  chatml.Signal(SIGTERM);
  EXPECT_EQ(chatml.Wait(), 0);
  EXPECT_THAT(chatml.ErrorText(), HasSubstr("brings no chat template; its vocabulary has the tokens of chatml"));

  ServeProcess none({FolderWith({"<s>", "</s>"}).string()});
  EXPECT_THAT(none.AskJson(Post("/tokenize", chat), 400)["error"]["message"].get<std::string>(),
              HasSubstr("no chat template"));
  EXPECT_EQ(none.AskJson(Get("/tokenizer_info"))["has_chat_template"], false);
}

}  // namespace
}  // namespace dovetail::server::test
