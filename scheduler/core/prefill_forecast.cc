#include "scheduler/core/prefill_forecast.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace dovetail::scheduler {

const char* NameOf(PrefillBound bound) {
  switch (bound) {
    case PrefillBound::kDense: return "dense layers";
    case PrefillBound::kAttention: return "attention on compute workers";
    case PrefillBound::kPlane: return "attention workers";
    case PrefillBound::kLink: return "link";
  }
  return "";
}

std::string Describe(const PrefillForecast& forecast) {
  if (forecast.ranks == 0) return "";
  const std::string predicted = forecast.predicted_s > 0 ? absl::StrFormat("predicted %.3f s, ", forecast.predicted_s)
                                                         : "not predicted, for rates are not known yet, ";
  const std::string bound = forecast.predicted_s > 0 ? absl::StrCat("; most of it is ", NameOf(forecast.bound)) : "";
  return absl::StrCat(forecast.tokens, " tokens on ", forecast.ranks, forecast.ranks == 1 ? " rank" : " ranks", " by ",
                      proto::NameOf(forecast.way()), ": ", predicted,
                      absl::StrFormat("took %.3f s", forecast.measured_s), bound);
}

}  // namespace dovetail::scheduler
