// /openapi.json against the server that it describes: its routes, who may ask, its fields, their ranges, its errors.
#include <gmock/gmock.h>

#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"
#include "server/http/openapi.h"
#include "server/http/routes.h"
#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

// A body that each schema allows, with what it requires and no more.
const std::map<std::string, std::string> kSmallest = {
    {"Completion", R"({"prompt":"x"})"},
    {"Chat", R"({"messages":[{"role":"user","content":"x"}]})"},
    {"Responses", R"({"input":"x"})"},
    {"Messages", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":1})"},
    {"CountTokens", R"({"messages":[{"role":"user","content":"x"}]})"},
    {"Llama", R"({"prompt":"x"})"},
    {"Infill", R"({"input_prefix":"x"})"},
    {"Embedding", R"({"input":"x"})"},
    {"LlamaEmbedding", R"({"content":"x"})"},
    {"ApplyTemplate", R"({"messages":[{"role":"user","content":"x"}]})"},
    {"Tokenize", R"({"prompt":"x"})"},
    {"Detokenize", R"({"tokens":[97]})"}};

class OpenApi : public testing::Test {
 protected:
  Json SchemaOf(const Json& operation, std::string& name) const {
    const std::string reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
    name = reference.substr(reference.rfind('/') + 1);
    return doc_["components"]["schemas"][name];
  }
  // The operations with a body: path, schema's name, schema.
  std::vector<std::tuple<std::string, std::string, Json>> Posts() const {
    std::vector<std::tuple<std::string, std::string, Json>> posts;
    for (const auto& [path, methods] : doc_["paths"].items()) {
      if (!methods.contains("post")) continue;
      std::string name;
      const Json schema = SchemaOf(methods["post"], name);
      posts.emplace_back(path, name, schema);
    }
    return posts;
  }

  const Json doc_ = *ParseJson(OpenApiText("1"));
  TestServer test_{{.eos_after = 1}, {}, FillInModel()};
};

TEST_F(OpenApi, HasEveryRouteAndNoOther) {
  std::set<std::string> described, served;
  for (const auto& [path, methods] : doc_["paths"].items())
    for (const auto& [method, operation] : methods.items()) described.insert(method + path);
  for (const Route& route : Routes())
    served.insert(absl::StrCat(absl::AsciiStrToLower(std::string(route.method)), std::string(route.path),
                               route.takes_rest() ? "{model}" : ""));
  EXPECT_EQ(described, served);
  EXPECT_EQ(test_.AskJson(Get("/openapi.json"))["paths"], doc_["paths"]);
}

TEST_F(OpenApi, SaysWhoMayAsk) {
  HttpServerOptions options;
  options.api_keys = {"key"};
  TestServer test({.eos_after = 1}, options, FillInModel());
  for (const auto& [path, methods] : doc_["paths"].items()) {
    const std::string at = absl::StrReplaceAll(path, {{"{model}", "bytes"}});
    for (const auto& [method, operation] : methods.items()) {
      std::string body, name;
      if (method == "post") {
        SchemaOf(operation, name);
        body = kSmallest.at(name);
      }
      const auto ask = [&](const std::string& headers) {
        return test.Ask(method == "post" ? Post(at, body, headers) : Get(at, headers)).status;
      };
      EXPECT_EQ(ask(""), operation.contains("security") ? 200 : 401) << path;
      EXPECT_EQ(ask("X-Api-Key: key\r\n"), 200) << path;
      EXPECT_EQ(operation["responses"].contains("401"), !operation.contains("security")) << path;
    }
  }
}

TEST_F(OpenApi, RequiresWhatTheServerRequires) {
  for (const auto& [path, name, schema] : Posts()) {
    const Json smallest = *ParseJson(kSmallest.at(name));
    EXPECT_EQ(test_.Ask(Post(path, Dump(smallest))).status, 200) << path;
    if (!schema.contains("required")) continue;
    for (const auto& field : schema["required"]) {
      Json less = smallest;
      less.erase(field.get<std::string>());
      EXPECT_EQ(test_.AskJson(Post(path, Dump(less)), 400).contains("error"), true) << path << " without " << field;
    }
  }
}

// Of each field: null, its limits and one past them, and a value of another type.
TEST_F(OpenApi, FieldsHaveTheTypesAndRangesOfTheServer) {
  int checked = 0;
  for (const auto& [path, name, schema] : Posts()) {
    const Json smallest = *ParseJson(kSmallest.at(name));
    const auto status = [&](const std::string& field, const Json& value) {
      Json body = smallest;
      body[field] = value;
      const RawResponse response = test_.Ask(Post(path, Dump(body)));
      EXPECT_TRUE(response.status == 200 || response.status == 400) << path << " " << field << " " << Dump(value);
      ++checked;
      return response.status;
    };
    for (const auto& [field, one] : schema["properties"].items()) {
      if (smallest.contains(field) || !one.contains("type") || !one["type"].is_array()) continue;
      const std::string type = one["type"][0];
      EXPECT_EQ(status(field, nullptr), 200) << path << " " << field;
      const Json wrong = type == "string" ? Json(1) : Json("x");
      EXPECT_EQ(status(field, wrong), 400) << path << " " << field << " " << Dump(wrong);
      if (!one.contains("minimum") || type == "array") continue;
      const double least = one["minimum"].get<double>();
      if (least > -1e15) {
        EXPECT_EQ(status(field, least - 1), 400) << path << " " << field;
      }
      if (one.contains("maximum") && one["maximum"].get<double>() < 1e15) {
        EXPECT_EQ(status(field, one["maximum"].get<double>() + 1), 400) << path << " " << field;
      }
    }
  }
  EXPECT_GT(checked, 300);
}

}  // namespace
}  // namespace dovetail::server::test
