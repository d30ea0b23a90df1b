#include "engine/model_digest.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/sha256.h"

namespace dovetail::engine {
namespace {

constexpr size_t kSampleBytes = 256;  // of each end of a weight's bytes

}  // namespace

uint64_t ModelDigest(const model::Checkpoint& checkpoint, DType kv_dtype, DType state_dtype) {
  const model::ModelConfig& config = checkpoint.config();
  std::string text = absl::StrCat(static_cast<int>(kv_dtype), "|", static_cast<int>(config.architecture), "|",
                                  config.heads, "|", config.kv_heads, "|", config.key_dim, "|", config.value_dim);
  if (config.state && state_dtype != DType::kF32) absl::StrAppend(&text, "|states,", static_cast<int>(state_dtype));
  for (const model::RopeSpec& rope : config.ropes)
    absl::StrAppend(&text, "|", static_cast<int>(rope.kind), ",", rope.theta, ",", rope.factor, ",", rope.rotary_dims);
  for (const std::string& name : checkpoint.names()) {
    const auto source = checkpoint.Find(name);
    DT_CHECK(source.ok(), "a checkpoint has what it lists");
    absl::StrAppend(&text, "|", name, ",", static_cast<int>(source->type), ",", source->rows, ",", source->cols, ",");
    const auto* bytes = reinterpret_cast<const char*>(source->bytes.data());
    const size_t size = source->bytes.size(), sample = std::min(size, kSampleBytes);
    text.append(bytes, sample);
    text.append(bytes + size - sample, sample);
  }
  const Sha256Digest digest = Sha256(std::as_bytes(std::span(text.data(), text.size())));
  uint64_t value;
  std::memcpy(&value, digest.data(), sizeof(value));
  return value;
}

}  // namespace dovetail::engine
