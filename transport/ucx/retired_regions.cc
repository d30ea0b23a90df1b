#include "transport/ucx/retired_regions.h"

#include <utility>

namespace dovetail::transport::ucx {

void RetiredRegions::Add(NodeId writer, Epoch epoch, std::unique_ptr<ReceiveRegion> region, ProcessWatch process) {
  region->DropPages();
  bytes_ += region->size_bytes();
  regions_.push_back({writer, epoch, std::move(region), std::move(process)});
}

template <typename F>
void RetiredRegions::Drop(F&& which) {
  std::erase_if(regions_, [&](Retired& retired) {
    if (!which(retired)) return false;
    bytes_ -= retired.region->size_bytes();
    return true;
  });
}

void RetiredRegions::Released(NodeId writer, Epoch epoch) {
  Drop([&](const Retired& retired) { return retired.writer == writer && retired.epoch == epoch; });
}

void RetiredRegions::Clear() {
  Drop([](const Retired&) { return true; });
}

void RetiredRegions::Reap() {
  Drop([](Retired& retired) { return retired.process.Ended(); });
}

}  // namespace dovetail::transport::ucx
