// What browsers may read of answers to pages of other origins. Source: the Fetch standard, "CORS protocol".
#include <gmock/gmock.h>

#include "tests/server/test_server.h"

namespace dovetail::server::test {
namespace {

using ::testing::HasSubstr;

constexpr char kChat[] = "https://chat.example.com";

HttpServerOptions Allowing(std::vector<std::string> origins) {
  HttpServerOptions options;
  options.api_keys = {"a-key"};
  options.cors.origins = std::move(origins);
  return options;
}

std::string Preflight(const std::string& origin, const std::string& method, const std::string& headers = "") {
  return absl::StrCat("OPTIONS /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: ", origin,
                      "\r\nAccess-Control-Request-Method: ", method, "\r\n",
                      headers.empty() ? "" : absl::StrCat("Access-Control-Request-Headers: ", headers, "\r\n"), "\r\n");
}
std::string From(const std::string& origin) { return absl::StrCat("Origin: ", origin, "\r\n"); }

std::string Header(const RawResponse& response, const std::string& name) {
  const auto found = response.headers.find(name);
  return found == response.headers.end() ? "" : found->second;
}

TEST(Cors, WithoutOriginsNoPageMay) {
  TestServer test({}, Allowing({}));
  const RawResponse asked = test.Ask(Preflight(kChat, "POST"));
  EXPECT_EQ(asked.status, 401);
  EXPECT_EQ(Header(asked, "access-control-allow-origin"), "");
  EXPECT_EQ(Header(test.Ask(Get("/health", From(kChat))), "access-control-allow-origin"), "");
}

TEST(Cors, APreflightNeedsNoKeyAndRepeatsTheHeaders) {
  TestServer test({}, Allowing({kChat, "http://localhost:3000"}));
  for (const char* origin : {kChat, "http://localhost:3000"}) {
    const RawResponse asked = test.Ask(Preflight(origin, "POST", "authorization, content-type,x-stainless-os"));
    EXPECT_EQ(asked.status, 200);
    EXPECT_EQ(Header(asked, "access-control-allow-origin"), origin);
    EXPECT_THAT(Header(asked, "access-control-allow-methods"), HasSubstr("POST"));
    EXPECT_EQ(Header(asked, "access-control-allow-headers"), "authorization, content-type,x-stainless-os");
    EXPECT_THAT(Header(asked, "vary"), HasSubstr("Origin"));
    EXPECT_EQ(Header(asked, "access-control-allow-credentials"), "");
  }
}

TEST(Cors, WhatIsNotAllowedIsRefused) {
  HttpServerOptions options = Allowing({kChat});
  options.cors.methods = {"POST"};
  options.cors.headers = {"Authorization"};
  TestServer test({}, options);
  EXPECT_EQ(test.Ask(Preflight(kChat, "POST", "authorization")).status, 200);
  EXPECT_EQ(test.Ask(Preflight(kChat, "GET")).status, 403);
  EXPECT_EQ(test.Ask(Preflight(kChat, "POST", "authorization, x-other")).status, 403);
  EXPECT_EQ(test.Ask(Preflight(kChat, "POST", "x-a: b")).status, 403);
  for (const char* origin : {"https://evil.example.com", "https://chat.example.com.evil.example", "null",
                             "http://chat.example.com", "https://chat.example.com:444"}) {
    const RawResponse asked = test.Ask(Preflight(origin, "POST"));
    EXPECT_EQ(asked.status, 403) << origin;
    EXPECT_EQ(Header(asked, "access-control-allow-origin"), "") << origin;
  }
}

TEST(Cors, EveryAnswerToAnAllowedPageCanBeReadErrorsAndStreamsToo) {
  TestServer test({}, Allowing({kChat}));
  const std::string headers = absl::StrCat(From(kChat), "X-Api-Key: a-key\r\n");
  const std::string stream = R"({"model":"bytes","prompt":"x","max_tokens":2,"stream":true})";
  const struct {
    std::string request;
    int status;
  } cases[] = {{Get("/v1/models", headers), 200},
               {Get("/v1/models", From(kChat)), 401},
               {Get("/no/such/path", headers), 404},
               {Post("/v1/completions", "{", headers), 400},
               {Post("/v1/completions", stream, headers), 200}};
  for (const auto& [request, status] : cases) {
    const RawResponse response = test.Ask(request);
    EXPECT_EQ(response.status, status) << request;
    EXPECT_EQ(Header(response, "access-control-allow-origin"), kChat) << request;
    EXPECT_THAT(Header(response, "access-control-expose-headers"), HasSubstr("X-Request-Id"));
    EXPECT_EQ(Header(response, "vary"), "Origin") << request;
  }
  EXPECT_EQ(Header(test.Ask(Get("/health")), "vary"), "Origin");  // a cache must not give it to a page
}

TEST(Cors, OneAnswersHeadersAreNotTheNextOnes) {
  TestServer test({}, Allowing({kChat}));
  RawClient client(test.port());
  client.Send(Get("/health", From(kChat)));
  EXPECT_EQ(Header(client.Read(), "access-control-allow-origin"), kChat);
  client.Send(Get("/health", From("https://evil.example.com")));
  EXPECT_EQ(Header(client.Read(), "access-control-allow-origin"), "");
  client.Send("no request\r\n\r\n");
  EXPECT_EQ(Header(client.Read(), "access-control-allow-origin"), "");
}

TEST(Cors, AStarIsEveryPageAndNeverWithCredentials) {
  TestServer every({}, Allowing({"*"}));
  const RawResponse response = every.Ask(Get("/health", From("https://any.example.com")));
  EXPECT_EQ(Header(response, "access-control-allow-origin"), "*");
  EXPECT_EQ(Header(response, "vary"), "");
  HttpServerOptions options = Allowing({kChat});
  options.cors.credentials = true;
  TestServer test({}, options);
  EXPECT_EQ(Header(test.Ask(Preflight(kChat, "POST")), "access-control-allow-credentials"), "true");
}

TEST(Cors, AnOptionThatMeansNothingIsNamed) {
  const auto message = [](auto change) {
    HttpServerOptions options = Allowing({kChat});
    change(options.cors);
    return std::string(options.Validate().message());
  };
  EXPECT_EQ(message([](auto&) {}), "");
  EXPECT_EQ(message([](auto& cors) { cors.origins = {"null", "http://[::1]:3000", "chrome-extension://abc"}; }), "");
  for (const char* origin :
       {"https://x.example/", "x.example", "HTTPS://x.example", "https://*.example", "", "https://"})
    EXPECT_THAT(message([&](auto& cors) { cors.origins = {origin}; }), HasSubstr("--allowed-origins: '")) << origin;
  EXPECT_THAT(message([](auto& cors) { cors.origins = {"*", "https://x.example"}; }), HasSubstr("give it alone"));
  EXPECT_THAT(message([](auto& cors) { cors.methods = {"PO ST"}; }), HasSubstr("--allowed-methods: 'PO ST'"));
  EXPECT_THAT(message([](auto& cors) { cors.headers = {"a\r\nb"}; }), HasSubstr("--allowed-headers"));
  EXPECT_THAT(message([](auto& cors) { cors = {.origins = {"*"}, .credentials = true}; }),
              HasSubstr("name the origins"));
  EXPECT_THAT(message([](auto& cors) { cors = {.credentials = true}; }), HasSubstr("give --allowed-origins too"));
}

}  // namespace
}  // namespace dovetail::server::test
