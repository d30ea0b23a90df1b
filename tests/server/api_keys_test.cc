// Where API keys come from: flags, files and the environment of a `dovetail serve` process.
#include "server/cli/api_keys.h"

#include <gmock/gmock.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/http/key_ring.h"
#include "tests/server/serve_process.h"
#include "tests/support/test_data.h"

namespace dovetail::server::test {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kModel[] = "models/stories260K/stories260K-f32.gguf";

// A variable of this process and of those that it starts, until the end of a scope.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Environment() { unsetenv(name_); }

 private:
  const char* const name_;
};

class ApiKeys : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& text, fs::perms perms = fs::perms{0600}) {
    const fs::path path = folder_ / name;
    std::ofstream(path) << text;
    fs::permissions(path, perms);
    return path.string();
  }
  static std::vector<std::string> Texts(const std::vector<ApiKey>& keys) {
    std::vector<std::string> texts;
    for (const ApiKey& key : keys) texts.push_back(absl::StrCat(key.key, "|", key.tenant));
    return texts;
  }
  absl::StatusOr<std::vector<ApiKey>> Read(const std::string& file) {
    cli::KeySources sources = cli::ApiKeySources();
    sources.files = {file};
    return ReadKeys(sources);
  }
  fs::path folder_ = dovetail::test::TempFolder();
};

TEST_F(ApiKeys, OfFlagsFilesAndEnvironmentAllCount) {
  const Environment ours("DOVETAIL_API_KEY", "of-environment another");
  const Environment theirs("VLLM_API_KEY", "spelled-as-vllm");
  cli::KeySources sources = cli::ApiKeySources();
  sources.keys = {"of-flag"};
  sources.files = {Write("a", "# alice has two keys\nkey-1 alice\nkey-2\talice\r\n\n  key-3  \n"), Write("b", "key-4")};
  const auto keys = ReadKeys(sources);
  ASSERT_TRUE(keys.ok()) << keys.status();
  EXPECT_THAT(Texts(*keys), ElementsAre("of-flag|", "key-1|alice", "key-2|alice", "key-3|", "key-4|", "of-environment|",
                                        "another|", "spelled-as-vllm|"));
}

TEST_F(ApiKeys, AKeyActsForTheTenantThatItNames) {
  const KeyRing ring({ApiKey("key-1", "alice"), ApiKey("key-2", "alice"), "key-3"}, {});
  const auto tenant = [&](const std::string& key) {
    RequestHead head;
    head.headers.emplace_back("authorization", absl::StrCat("Bearer ", key));
    return ring.Authorize(head, Scope::kInference);
  };
  EXPECT_EQ(tenant("key-1"), "alice");
  EXPECT_EQ(tenant("key-2"), "alice");
  EXPECT_THAT(*tenant("key-3"), HasSubstr("key-"));
  EXPECT_THAT(*tenant("key-3"), Not(HasSubstr("key-3")));
  EXPECT_EQ(tenant("key-4"), std::nullopt);
}

TEST_F(ApiKeys, AMistakeInAFileIsNamedWithoutTheKey) {
  const struct {
    std::string file, said;
  } mistakes[] = {
      {(folder_ / "none").string(), "none cannot be read"},
      {folder_.string(), "cannot be read"},
      {Write("empty", "# nothing here\n\n"), "empty holds no key"},
      {Write("three", "ok\nsecret-1 alice bob\n"), "three line 2: a line is a key, or a key and its tenant's name"},
      {Write("umlaut", "secret-\xc3\xa4\n"), "umlaut line 1: a key may only have visible ASCII"},
      {Write("long", std::string(1025, 's')), "long line 1: a key must have 1 to 1024 characters"},
      {Write("tenant", "secret-1 a/b\n"), "tenant line 1: a tenant's name has at most 64 characters"},
      {Write("taken", "secret-1 key-0011223344556677\n"), "taken line 1: a tenant cannot be named key-0011"},
      {Write("anonymous", "secret-1 anonymous\n"), "anonymous line 1: a tenant cannot be named anonymous"},
      {Write("twice", "secret-1 alice\nsecret-1 bob\n"), "one key is given twice, for the tenants 'alice' and 'bob'"},
      {Write("open", "secret-1\n", fs::perms{0602}), "open and so add a key; chmod 600 it"},
  };
  for (const auto& [file, said] : mistakes) {
    const auto keys = Read(file);
    ASSERT_FALSE(keys.ok()) << said;
    EXPECT_THAT(std::string(keys.status().message()), HasSubstr(said));
    EXPECT_THAT(std::string(keys.status().message()), Not(HasSubstr("secret")));
  }
}

TEST_F(ApiKeys, AnEmptyVariableDoesNotOpenTheServer) {
  const Environment empty("DOVETAIL_API_KEY", " ");
  const auto keys = ReadKeys(cli::ApiKeySources());
  EXPECT_THAT(std::string(keys.status().message()), HasSubstr("DOVETAIL_API_KEY: is set and holds no key"));
}

TEST_F(ApiKeys, AServerTakesThemAndSaysWhichOthersCanRead) {
  DOVETAIL_DATA_OR_SKIP(const auto model, kModel);
  const Environment variable("VLLM_API_KEY", "of-environment");
  const std::string file = Write("readable", "of-file alice\n", fs::perms{0644});
  ServeProcess server({model.string(), "--api-key", "of-flag", "--api-key-file", file, "--metrics-api-key-file",
                       Write("metrics", "of-metrics\n")});
  const auto status = [&](const char* path, const char* key) {
    return server.Ask(Get(path, absl::StrCat("Authorization: Bearer ", key, "\r\n"))).status;
  };
  for (const char* key : {"of-flag", "of-file", "of-environment"}) EXPECT_EQ(status("/v1/models", key), 200) << key;
  EXPECT_EQ(server.Ask(Get("/v1/models")).status, 401);
  for (const char* key : {"of-metrics", "alice", "of-fil"}) EXPECT_EQ(status("/v1/models", key), 401) << key;
  EXPECT_EQ(status("/metrics", "of-metrics"), 200);
  EXPECT_EQ(status("/metrics", "of-file"), 401);
  server.Signal(SIGTERM);
  EXPECT_EQ(server.Wait(), 0);
  const std::string said = server.ErrorText();
  EXPECT_THAT(said, HasSubstr("--api-key: other users of this host can read the key in the process list"));
  EXPECT_THAT(said, HasSubstr(absl::StrCat("may open ", file, " (mode 0644); chmod 600 it")));
  EXPECT_THAT(said, Not(HasSubstr("may open " + (folder_ / "metrics").string())));
  EXPECT_THAT(said, Not(HasSubstr("of-f")));
}

TEST_F(ApiKeys, APortThatEveryoneMayUseIsSaidOnce) {
  DOVETAIL_DATA_OR_SKIP(const auto model, kModel);
  const auto said = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), model.string());
    ServeProcess server(flags);
    server.Signal(SIGTERM);
    EXPECT_EQ(server.Wait(), 0);
    const std::string text = server.ErrorText();
    const size_t first = text.find("OPEN TO THE NETWORK: http://0.0.0.0:0 can be used by everyone");
    if (first == std::string::npos) return 0;
    return text.find("OPEN TO THE NETWORK", first + 1) == std::string::npos ? 1 : 2;
  };
  EXPECT_EQ(said({"--host", "0.0.0.0"}), 1);
  EXPECT_EQ(said({"--host", "0.0.0.0", "--api-key-file", Write("keys", "a-key\n")}), 0);
  EXPECT_EQ(said({}), 0);
}

}  // namespace
}  // namespace dovetail::server::test
