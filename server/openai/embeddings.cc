#include "server/openai/embeddings.h"

#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace dovetail::server {
namespace {

static_assert(std::endian::native == std::endian::little, "base64 holds little-endian floats");

void AppendNumbers(std::span<const float> values, std::string& out) {
  out += '[';
  for (const float value : values) {
    if (out.back() != '[') out += ',';
    char digits[32];
    out.append(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
  }
  out += ']';
}

void AppendBase64(std::span<const float> values, std::string& out) {
  const absl::string_view bytes(reinterpret_cast<const char*>(values.data()), values.size_bytes());
  absl::StrAppend(&out, "\"", absl::Base64Escape(bytes), "\"");
}

// [{"index", "embedding": [vector]}], as llama-server answers: a vector of each of the prompt's pooled outputs, one.
std::string LlamaBody(const ResponseSpec& spec, const std::vector<std::vector<float>>& pooled) {
  std::string body = "[";
  for (size_t i = 0; i < pooled.size(); ++i) {
    absl::StrAppend(&body, i == 0 ? "" : ",", "{\"index\":", i, ",\"embedding\":[");
    AppendNumbers(ShapeVector(pooled[i], spec.form), body);
    body += "]}";
  }
  return body + "]";
}

}  // namespace

std::vector<float> ShapeVector(std::span<const float> pooled, const VectorForm& form) {
  const size_t size = form.dimensions == 0 ? pooled.size() : static_cast<size_t>(form.dimensions);
  std::vector<float> vector(pooled.begin(), pooled.begin() + static_cast<std::ptrdiff_t>(size));
  if (!form.normalise) return vector;
  double squares = 0;
  for (const float value : vector) squares += static_cast<double>(value) * value;
  if (squares == 0) return vector;
  const double length = std::sqrt(squares);
  for (float& value : vector) value = static_cast<float>(value / length);
  return vector;
}

std::string VectorsBody(const ResponseSpec& spec, const std::vector<std::vector<float>>& pooled,
                        const UsageTotals& usage) {
  if (spec.form.llama) return LlamaBody(spec, pooled);
  std::string body = absl::StrCat("{\"id\":", Dump(spec.id), ",\"object\":\"list\",\"created\":", spec.created,
                                  ",\"model\":", Dump(spec.model), ",\"data\":[");
  for (size_t i = 0; i < pooled.size(); ++i) {
    absl::StrAppend(&body, i == 0 ? "" : ",", "{\"object\":\"embedding\",\"index\":", i, ",\"embedding\":");
    const std::vector<float> vector = ShapeVector(pooled[i], spec.form);
    if (spec.form.base64)
      AppendBase64(vector, body);
    else
      AppendNumbers(vector, body);
    body += '}';
  }
  const Json counts = {{"prompt_tokens", usage.prompt_tokens},
                       {"total_tokens", usage.prompt_tokens},
                       {"completion_tokens", 0},
                       {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  absl::StrAppend(&body, "],\"usage\":", Dump(counts), "}");
  return body;
}

}  // namespace dovetail::server
