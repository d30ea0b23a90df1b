#pragma once
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "server/http/http_server.h"
#include "server/openai/json.h"
#include "tests/server/fake_engine.h"
#include "tests/server/raw_client.h"
#include "tests/server/test_model.h"

namespace dovetail::server::test {

// A server on a free port of 127.0.0.1 before a fake engine.
struct TestServer {
  explicit TestServer(FakeEngineOptions engine_options = {}, HttpServerOptions options = {},
                      std::shared_ptr<ServedModel> served = TestModel())
      : engine(std::move(engine_options)), server(WithFreePort(std::move(options))) {
    const absl::Status started = server.Start();
    EXPECT_TRUE(started.ok()) << started.message();
    server.Serve(std::move(served), &engine);
  }

  static HttpServerOptions WithFreePort(HttpServerOptions options) {
    options.port = 0;
    return options;
  }

  int port() const { return server.port(); }
  RawResponse Ask(const std::string& request) const {
    RawClient client(port());
    client.Send(request);
    return client.Read();
  }
  Json AskJson(const std::string& request, int status = 200) const {
    const RawResponse response = Ask(request);
    EXPECT_EQ(response.status, status) << response.body;
    const auto json = ParseJson(response.body);
    EXPECT_TRUE(json.ok()) << response.body;
    return json.ok() ? *json : Json();
  }

  FakeEngine engine;  // outlives the server
  HttpServer server;
};

}  // namespace dovetail::server::test
