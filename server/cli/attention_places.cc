#include "server/cli/attention_places.h"

#include "absl/strings/str_split.h"
#include "kernels/cuda/runtime/cuda_device.h"
#include "server/cli/engine_flags.h"

namespace dovetail::cli {

absl::StatusOr<std::vector<AttentionPlace>> ParseAttentionPlaces(const std::string& value) {
  std::vector<AttentionPlace> places;
  for (const absl::string_view part : absl::StrSplit(value, ',')) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(part, absl::MaxSplits('=', 1));
    AttentionPlace place{pair.first, std::nullopt};
    if (place.device != "cpu" && !kernels::cuda::ParseCudaName(place.device).ok())
      return InvalidArgument("--attention-devices: '", place.device,
                             "' is neither cpu nor cuda:N, as in cuda:1,cpu or cuda:0=8GiB,cpu=64GiB");
    if (part.size() > place.device.size()) {
      DT_ASSIGN_OR_RETURN(place.kv_bytes, ParseBytes("--attention-devices", pair.second));
    }
    places.push_back(std::move(place));
  }
  return places;
}

}  // namespace dovetail::cli
