// A server on 127.0.0.1 before a fake engine, for client libraries to talk to when there is no model: fake_server
// [--port N] [--api-key K].
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/http/http_server.h"
#include "tests/server/fake_engine.h"
#include "tests/server/test_model.h"

int main(int argc, char** argv) {
  using namespace dovetail::server;
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before any thread begins

  HttpServerOptions options;
  options.port = 0;
  int step_us = 200;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--port") options.port = std::atoi(argv[i + 1]);
    if (flag == "--api-key") options.api_keys.push_back(argv[i + 1]);
    if (flag == "--step-us") step_us = std::atoi(argv[i + 1]);
  }
  test::FakeEngine engine({.step_interval = absl::Microseconds(step_us)});
  HttpServer server(options);
  if (const absl::Status started = server.Start(); !started.ok()) {
    std::fprintf(stderr, "%s\n", std::string(started.message()).c_str());
    return 1;
  }
  server.Serve(test::TestModel(), &engine);
  std::printf("listening on http://%s:%d\n", options.host.c_str(), server.port());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&signals, &signal);
  server.Drain(absl::Seconds(5));
  server.Stop();
  return 0;
}
