#include <span>

#include "base/check.h"
#include "model/formats/safetensors_parse.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {

void FuzzSafetensors(const uint8_t* data, size_t size) {
  const auto tensors = model::ParseSafetensors("model.safetensors", std::as_bytes(std::span(data, size)));
  if (!tensors.ok()) {
    DT_CHECK(!tensors.status().message().empty());
    return;
  }
  // What was accepted tiles the end of the file exactly, in order.
  size_t bytes = 0;
  for (const model::SafetensorsTensor& tensor : *tensors) {
    if (!tensor.bytes.empty()) DT_CHECK(bytes == 0 || tensor.bytes.data() > reinterpret_cast<const std::byte*>(data));
    bytes += tensor.bytes.size();
  }
  DT_CHECK(bytes <= size);
  if (!tensors->empty() && bytes > 0)
    DT_CHECK(tensors->back().bytes.data() + tensors->back().bytes.size() ==
             reinterpret_cast<const std::byte*>(data) + size);
}

}  // namespace dovetail::fuzz
