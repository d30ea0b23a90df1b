#pragma once
#include <cstdint>
#include <string>

#include "base/status.h"
#include "http_client/http_client.h"
#include "loadgen/openai.h"
#include "loadgen/prompt_writer.h"

// What a server says about itself before a load starts. All calls wait for answers.

namespace dovetail::loadgen {

using Headers = std::vector<std::pair<std::string, std::string>>;

struct ServedModel {
  std::string name;
  int64_t max_model_len = 0;  // 0: it does not say
};

// The model called `wanted`, or the first one where that is empty, by /v1/models. kNotFound lists what there is where
// `wanted` is not served; kUnavailable where there is no server; kFailedPrecondition where it answers and lists no
// model.
// Threads: the client's thread only; blocks.
absl::StatusOr<ServedModel> AskForModel(http_client::HttpClient& client, const Headers& headers,
                                        const std::string& wanted);

// Counts by the server's /tokenize, as vLLM and Dovetail have it.
// Threads: thread-compatible.
class ServerTokenCounter final : public TokenCounter {
 public:
  ServerTokenCounter(http_client::HttpClient& client, Headers headers, std::string model)
      : client_(client), headers_(std::move(headers)), model_(std::move(model)) {}
  absl::StatusOr<int64_t> Count(std::string_view text) override;

 private:
  http_client::HttpClient& client_;
  const Headers headers_;
  const std::string model_;
};

// Tokens per common word, from the usage of one request of such words. kUnavailable where it has none.
// Threads: the client's thread only; blocks.
absl::StatusOr<double> TokensPerWordByUsage(http_client::HttpClient& client, const ApiOptions& api);

}  // namespace dovetail::loadgen
