#pragma once
#include <span>
#include <string>
#include <vector>

#include "server/openai/response_spec.h"
#include "server/openai/usage_totals.h"

namespace dovetail::server {

// What a client gets of a pooled hidden state: its first `dimensions` values, normalised if the form says so. A vector
// of zeros stays one.
//   pooled: [hidden]
// Threads: pure
std::vector<float> ShapeVector(std::span<const float> pooled, const VectorForm& form);

// The answer to /v1/embeddings, or to llama-server's /embedding, as JSON text. A number has as many digits as its float
// needs to be read back.
//   pooled: of each prompt of the spec, [hidden]
// Threads: pure
std::string VectorsBody(const ResponseSpec& spec, const std::vector<std::vector<float>>& pooled,
                        const UsageTotals& usage);

}  // namespace dovetail::server
