#include <span>
#include <vector>

#include "base/check.h"
#include "model/config.h"
#include "model/families/checkpoint_tensors.h"
#include "model/formats/dequantize.h"
#include "model/formats/gguf.h"
#include "tests/fuzz/targets.h"

namespace dovetail::fuzz {
namespace {

using model::GgufFile;

// Reads every key as every type: each answer is a value or an error, and a view stays inside the file.
void ReadMetadata(const GgufFile& file) {
  for (const auto& [key, value] : file.metadata()) {
    (void)file.Int(key);
    (void)file.Float(key);
    (void)file.Bool(key);
    (void)file.String(key);
    (void)file.Ints(key);
    (void)file.Floats(key);
    if (const auto strings = file.Strings(key); strings.ok() && *strings) {
      size_t bytes = 0;
      for (const std::string_view text : **strings) bytes += text.size();
      DT_CHECK(bytes <= value.bytes.size());
    }
  }
}

void ReadTensors(const GgufFile& file) {
  std::vector<float> row;
  for (const model::GgufTensor& tensor : file.tensors()) {
    DT_CHECK(static_cast<int64_t>(tensor.bytes.size()) == model::RowBytes(tensor.type, tensor.elements));
    row.resize(static_cast<size_t>(tensor.dims[0]));
    model::Dequantize(tensor.type, tensor.bytes.data(), tensor.dims[0], row.data());
  }
}

}  // namespace

void FuzzGguf(const uint8_t* data, size_t size) {
  const auto file = GgufFile::FromBytes("model.gguf", std::as_bytes(std::span(data, size)));
  if (!file.ok()) {
    DT_CHECK(!file.status().message().empty());
    return;
  }
  ReadMetadata(**file);
  ReadTensors(**file);
  const auto config = model::ConfigFromGguf(**file);
  if (!config.ok()) return;
  for (const model::RopeSpec& rope : config->ropes) (void)model::MakeRopeTable(rope, config->max_positions);
  (void)model::TensorsOf(*config);
}

}  // namespace dovetail::fuzz
