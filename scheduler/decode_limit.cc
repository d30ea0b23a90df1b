#include "scheduler/decode_limit.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/decode_reads.h"

namespace dovetail::scheduler {
namespace {

constexpr int64_t kUsualTokens = 1024;
constexpr double kMuchLess = 0.8;  // than what is read now

}  // namespace

std::string DecodeLimit(const control::Capabilities& has, const control::ModelSummary& model, int64_t longest,
                        bool layers_on_gpu) {
  const double rate = ReadRate(has);
  if (rate <= 0) return "";
  const auto bytes_in = [&](KvStorage storage) { return proto::DecodeBytes(model.attention, storage, longest); };
  const auto most = [&](int64_t tokens) {
    return rate / std::max(1.0, proto::DecodeBytes(model.attention, model.kv_storage, tokens));
  };
  const int64_t usual = std::min(kUsualTokens, longest);
  std::string text =
      absl::StrFormat("; at the %.0f GB/s that it reads, at most %.0f tokens/s of sequences at %d tokens", rate * 1e-9,
                      most(usual), usual);
  if (longest > usual) absl::StrAppendFormat(&text, " and %.0f at %d", most(longest), longest);
  const bool on_host = !has.device.starts_with("cuda");
  if (layers_on_gpu && on_host && model.kv_storage == KvStorage::kAsSent &&
      bytes_in(KvStorage::kInt8) < kMuchLess * bytes_in(KvStorage::kAsSent))
    absl::StrAppend(&text, "; --kv-cache-dtype int8 reads less for each, and more --threads read faster");
  return text;
}

}  // namespace dovetail::scheduler
